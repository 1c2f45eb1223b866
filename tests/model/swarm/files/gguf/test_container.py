"""Headers of GGUF files: what is read, and one line for each that is no model."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy
import pytest

from node.model.checkpoint import open_checkpoint
from swarm.base.errors import SwarmError, UnknownModel, UnsupportedModel
from swarm.files.gguf.container import ShortHeader, parse_header, read_header
from tests.model.gguf_files import add_tokenizer

Change = Callable[[bytearray], None]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with every type of metadata, and two tensors."""
    path = tmp_path_factory.mktemp("gguf") / "any.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.byte", 200)
    writer.add_int64("a.long", -(2**40))
    writer.add_float64("a.double", 0.1)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "naïve")
    writer.add_array("a.texts", ["x", "", "東"])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_tensor("first.weight", numpy.arange(12, dtype=numpy.float32).reshape(3, 4))
    blocks = gguf.quants.quantize(numpy.ones((2, 64), numpy.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("second.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_a_header_is_what_the_library_wrote(written: bytes) -> None:
    header = parse_header(written, len(written), "any.gguf")
    own = {key: value for key, value in header.metadata.items() if key.startswith("a.")}
    assert own == {
        "a.byte": 200,
        "a.long": -(2**40),
        "a.double": 0.1,
        "a.flag": True,
        "a.text": "naïve",
        "a.texts": ["x", "", "東"],
        "a.numbers": [1, 2, 3],
    }
    first, second = header.tensors["first.weight"], header.tensors["second.weight"]
    assert (first.shape, first.encoding.name, first.size_bytes) == ((3, 4), "f32", 48)
    assert (second.shape, second.encoding.name, second.size_bytes) == ((2, 64), "q8_0", 2 * 2 * 34)
    values = numpy.frombuffer(written[first.start : first.start + first.size_bytes], numpy.float32)
    assert values.tolist() == list(range(12))


def test_a_beginning_that_ends_within_the_header_asks_for_more(written: bytes) -> None:
    header = parse_header(written, len(written), "any.gguf")
    for count in (4, 24, 100, header.size_bytes // 2):
        with pytest.raises(ShortHeader):
            parse_header(written[:count], len(written), "any.gguf")
    assert parse_header(written[: header.size_bytes], len(written), "any.gguf") == header


def poke(at: int, data: bytes) -> Change:
    def change(file: bytearray) -> None:
        file[at : at + len(data)] = data

    return change


def cut(count: int) -> Change:
    def change(file: bytearray) -> None:
        del file[-count:]

    return change


def unknown_type(file: bytearray) -> None:
    at = file.index(b"second.weight") + len(b"second.weight") + 4 + 16
    file[at : at + 4] = struct.pack("<I", 99)


def half_blocks(file: bytearray) -> None:
    at = file.index(b"second.weight") + len(b"second.weight") + 4
    file[at : at + 8] = struct.pack("<Q", 63)


BROKEN: dict[str, tuple[Change, str]] = {
    "magic": (poke(0, b"GGML"), "no GGUF file: it begins with b'GGML'"),
    "version 1": (poke(4, b"\1\0\0\0"), "GGUF version 1; versions 2 and 3 are read"),
    "big-endian": (poke(4, b"\0\0\0\3"), "a big-endian GGUF file"),
    "counts": (poke(8, b"\xff" * 8), "damaged: it names 18446744073709551615 tensors"),
    "a text's length": (poke(24, b"\xff" * 8), "damaged: a text of 18446744073709551615 bytes"),
    "a type": (unknown_type, "second.weight is stored in type 99, which is not read; read are F32, F16"),
    "blocks": (half_blocks, "second.weight: 63 columns are no whole blocks of Q8_0"),
    "tensors cut off": (cut(64), "cut off: its tensors end at byte"),
    "header cut off": (cut(300), "cut off: it ends within its header"),
    "nothing": (lambda file: file.clear(), "no GGUF file: it has 0 bytes"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_damaged_file_is_one_line(name: str, written: bytes, tmp_path: Path) -> None:
    change, said = BROKEN[name]
    file = bytearray(written)
    change(file)
    path = tmp_path / "broken.gguf"
    path.write_bytes(file)
    with pytest.raises(UnsupportedModel) as caught:
        read_header(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("seed", range(8))
def test_a_header_with_wrong_bytes_is_refused_or_read(seed: int, written: bytes) -> None:
    random = numpy.random.default_rng(seed)
    end = parse_header(written, len(written), "any.gguf").size_bytes
    for _ in range(250):
        file = bytearray(written)
        for at in random.integers(0, end, 3):
            file[at] = random.integers(0, 256)
        try:
            parse_header(file, len(file), "any.gguf")
        except (UnsupportedModel, ShortHeader):
            continue


def other_kind(path: Path, architecture: str, kind: str, *, tensors: bool = True) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(kind)
    add_tokenizer(writer)
    if tensors:
        writer.add_tensor("token_embd.weight", numpy.ones((4, 4), numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("architecture", "kind", "tensors", "said"),
    [
        ("clip", "mmproj", True, "the eyes of a model (mmproj), not the model"),
        ("llama", "adapter", True, "a LoRA adapter, not a model"),
        ("llama", "imatrix", True, "its kind is 'imatrix', not a model"),
        ("llama", "model", False, "a tokenizer without weights"),
        (
            "rwkv7",
            "model",
            True,
            "GGUF of architecture 'rwkv7' is not read: transformers has no class for it; read are afmoe, arcee",
        ),
        ("llama", "model", True, "its metadata has no llama.context_length"),
    ],
)
def test_what_is_no_model_that_runs_is_one_line(
    architecture: str, kind: str, tensors: bool, said: str, tmp_path: Path
) -> None:
    path = other_kind(tmp_path / "other.gguf", architecture, kind, tensors=tensors)
    with pytest.raises(UnsupportedModel) as caught:
        open_checkpoint(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_said_so_and_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"nowhere\.gguf: no such file$"):
        open_checkpoint(tmp_path / "nowhere.gguf")
    with pytest.raises(SwarmError, match=r"^models/nowhere\.gguf: no such file$"):
        open_checkpoint("models/nowhere.gguf")
