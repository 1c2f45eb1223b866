"""GGUF models as folders of transformers: config, tokenizer, the cache, and what is fetched of a model on the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer

from client.base.target import load_target
from node.model.checkpoint import open_checkpoint
from node.model.span import load_span
from swarm.base.errors import ConfigError, HubError, UnknownModel, UnsupportedModel
from swarm.base.layers import Span
from swarm.files.fingerprint import model_identity
from swarm.files.gguf import folder as folders
from swarm.files.gguf.config import config_of
from swarm.files.gguf.container import GgufHeader, TensorPlace, read_header
from swarm.files.gguf.encodings import ENCODINGS
from swarm.files.gguf.folder import write_tokenizer
from swarm.files.hub import find_model
from tests.fake_hub import FakeHub, Repo
from tests.model.gguf_files import TinyGguf
from tests.property.tiny_tokenizers import byte_fallback, byte_level

REPO = "org/Tiny-GGUF"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    return tmp_path / "own/canopy/gguf"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = TinyGguf.of("llama", "llama", lambda *_: Kind.Q8_0)
    return made.write(tmp_path_factory.mktemp("tiny") / "Tiny-Q8_0.gguf")


@pytest.fixture
def gguf_hub(hub: FakeHub, tiny: Path) -> FakeHub:
    hub.repos[REPO] = Repo(
        {"README.md": b"#", "config.json": b"{}", tiny.name: tiny.read_bytes(), "Tiny-F16.gguf": b"GGUF of no use"}
    )
    return hub


def header_with(**fields: Any) -> GgufHeader:  # noqa: ANN401
    """A header of a Llama with some fields more; `__` stands for a dot."""
    base: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.context_length": 131_072,
        "llama.block_count": 1,
        "llama.embedding_length": 2048,
        "llama.feed_forward_length": 8192,
        "llama.attention.head_count": 32,
        "llama.rope.freq_base": 500_000.0,
    }
    metadata = dict(base)
    metadata |= {name.replace("__", "."): value for name, value in fields.items()}
    names = ["token_embd.weight", *(["rope_freqs.weight"] if "freqs" in metadata else [])]
    places = {name: TensorPlace(name, (320, 2048), ENCODINGS[0], 0) for name in names}
    return GgufHeader(metadata, places, 0)


def test_every_program_sees_a_folder_of_transformers(tiny: Path, cache: Path) -> None:
    folder, hub = find_model(tiny)
    assert hub is None
    assert folder.name == "Tiny-Q8_0"
    assert folder.parent.parent == cache
    assert (folder / tiny.name).resolve() == tiny
    target = load_target(tiny)
    text = "It was a dark night; naïve café 🦜"
    assert target.name == "Tiny-Q8_0"
    assert target.tokenizer.decode(target.tokenizer(text).input_ids) == text
    assert target.tokenizer(text).input_ids == byte_level().encode(text).ids
    assert target.eos_ids == {1}
    assert target.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    identity = model_identity(folder, folder.name)
    assert target.is_like(identity)
    assert find_model(tiny)[0] == folder


def test_a_folder_is_made_once_and_anew_for_another_file(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "Tiny-Q8_0.gguf"
    copy.write_bytes(tiny.read_bytes())
    folder = find_model(copy)[0]
    monkeypatch.setattr(folders, "write_tokenizer", lambda *_: pytest.fail("made twice"))
    assert find_model(copy)[0] == folder
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    copy.write_bytes(tiny.read_bytes() + bytes(32))
    assert find_model(copy)[0] != folder


def test_old_folders_go(tiny: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MAX_FOLDERS", 2)
    made = []
    for number in range(3):
        copy = tmp_path / f"{number}.gguf"
        copy.write_bytes(tiny.read_bytes())
        made.append(find_model(copy)[0])
    assert [folder.exists() for folder in made] == [False, True, True]
    assert len(list(cache.iterdir())) == 2


def test_a_model_that_cannot_be_read_leaves_nothing(tiny: Path, tmp_path: Path, cache: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny.read_bytes().replace(b"gpt-2", b"gpt-9"))
    with pytest.raises(UnsupportedModel, match=r"broken: its text is split by 'gpt-9', which is not known; known are "):
        find_model(broken)
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_one_line(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot be written .*; set XDG_CACHE_HOME"):
        find_model(tiny)


@pytest.mark.parametrize("name", [f"{REPO}:Q8_0", f"{REPO}:Tiny-Q8_0.gguf", f"{REPO}:q8_0"])
def test_of_a_model_on_the_hub_a_client_fetches_the_header_alone(gguf_hub: FakeHub, tiny: Path, name: str) -> None:
    target = load_target(name)
    assert target.name == f"{REPO}:Q8_0"
    end = folders.local_folder([tiny])
    assert (target.config_digest, target.tokenizer_digest) == (
        (own := load_target(tiny)).config_digest,
        own.tokenizer_digest,
    )
    assert end.exists()
    assert gguf_hub.ranges(tiny.name) == ["bytes=0-1048575"]
    assert not list(find_model(name)[0].glob("*.safetensors"))
    load_target(name)
    assert len(gguf_hub.ranges(tiny.name)) == 1, "the header is fetched once"


def test_a_node_fetches_the_file_and_serves_the_same_tensors(gguf_hub: FakeHub, tiny: Path) -> None:
    checkpoint = open_checkpoint(f"{REPO}:Q8_0")
    assert checkpoint.name == f"{REPO}:Q8_0"
    assert checkpoint.missing_bytes(checkpoint.weight_map) == tiny.stat().st_size
    ours = load_span(checkpoint, Span(1, 2), torch.float32)
    assert checkpoint.missing_bytes(checkpoint.weight_map) == 0
    local = load_span(open_checkpoint(tiny), Span(1, 2), torch.float32)
    for mine, theirs in zip(ours.model.parameters(), local.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_split_model_in_a_folder_of_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    made = TinyGguf.of("llama", "llama", lambda *_: Kind.Q8_0)
    (tmp_path / "parts").mkdir()
    made.write(tmp_path / "parts/Tiny-Q8_0.gguf", parts=5)
    files = {f"Q8_0/{path.name}": path.read_bytes() for path in sorted((tmp_path / "parts").iterdir())}
    hub.repos[REPO] = Repo(files)
    checkpoint = open_checkpoint(REPO)  # the only model that there is
    assert checkpoint.name == f"{REPO}:Q8_0"
    load_span(checkpoint, Span(1, 2), torch.float32)
    here = {path.name for path in checkpoint.hub.folder.rglob("*.gguf")} if checkpoint.hub else set()
    assert 0 < len(here) < 5, "a span's parts alone are fetched"


def test_what_the_hub_does_not_have_is_one_line(gguf_hub: FakeHub) -> None:
    with pytest.raises(UnknownModel, match=f"no file 'Q2_K'; it has {REPO}:F16, {REPO}:Q8_0"):
        find_model(f"{REPO}:Q2_K")
    with pytest.raises(UnknownModel, match="which of its GGUF files"):
        find_model(REPO)
    with pytest.raises(UnsupportedModel, match=r"Tiny-F16\.gguf: GGUF version"):
        find_model(f"{REPO}:F16")
    with pytest.raises(HubError, match="has no public model of this name"):
        find_model("org/nothing:Q8_0")


def test_without_the_hub_the_cache_serves(gguf_hub: FakeHub) -> None:
    checkpoint = open_checkpoint(f"{REPO}:Q8_0")
    checkpoint.fetch(checkpoint.weight_map)
    gguf_hub.status = 503
    again = open_checkpoint(f"{REPO}:Q8_0")
    assert again.name == checkpoint.name
    load_span(again, Span(0, 1), torch.float32)


def test_without_the_hub_a_client_has_the_header_that_it_fetched(gguf_hub: FakeHub) -> None:
    target = load_target(f"{REPO}:Q8_0")
    gguf_hub.status = 503
    again = load_target(f"{REPO}:Q8_0")
    assert (again.name, again.config_digest) == (target.name, target.config_digest)
    checkpoint = open_checkpoint(f"{REPO}:Q8_0")
    with pytest.raises(HubError, match=r"Tiny-Q8_0\.gguf: .*is in trouble \(HTTP 503\)"):
        checkpoint.fetch(checkpoint.weight_map)
    with pytest.raises(HubError, match="is in trouble"):
        load_target(f"{REPO}:Q4_0")


def test_llama_3s_rope_comes_back_from_its_frequencies() -> None:
    for factor in (8.0, 32.0):
        config: dict[str, Any] = {"rope_type": "llama3", "factor": factor, "rope_theta": 500_000.0}
        config |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        written = llama3_frequencies(config, 64)
        made = config_of(header_with(freqs=1), "x", lambda _, written=written: written)  # type: ignore[misc]
        scaling = made["rope_scaling"]
        assert scaling == {name: value for name, value in config.items() if name != "rope_theta"}
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight is of no form that transformers has"):
        config_of(header_with(freqs=1), "x", lambda _: [1.0, 2.0, 3.0])


def llama3_frequencies(rope: dict[str, Any], head: int) -> list[float]:
    """What llama.cpp's converter writes: by what transformers' own function divides each frequency."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(head_dim=head, hidden_size=2048, num_attention_heads=32, rope_parameters=rope)
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1 / rope["rope_theta"] ** (torch.arange(0, head, 2) / head)
    return [float(one) for one in plain / stretched]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"head_dim": 64, "vocab_size": 320, "tie_word_embeddings": True, "rope_theta": 500_000.0}),
        ({"llama__attention__key_length": 128}, {"head_dim": 128}),
        ({"llama__rope__scaling__type": "none"}, {"rope_scaling": None}),
        (
            {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0},
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        ),
        (
            {
                "llama__rope__scaling__type": "yarn",
                "llama__rope__scaling__factor": 4.0,
                "llama__rope__scaling__original_context_length": 32_768,
            },
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}},
        ),
        (
            {"llama__rope__scaling__factor": 4.0},
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        ),
        ({"llama__attention__layer_norm_rms_epsilon": 9.999999747378752e-06}, {"rms_norm_eps": 1e-05}),
        ({"tokenizer__ggml__eos_token_id": 7}, {"eos_token_id": 7, "pad_token_id": None}),
    ],
)
def test_metadata_become_a_config(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    made = config_of(header_with(**fields), "x", lambda _: [])
    assert {name: made.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"llama__attention__head_count_kv": [4, 8]}, "llama.attention.head_count_kv differs from layer to layer"),
        ({"llama__rope__scaling__type": "odd"}, "llama.rope.scaling is 'odd', which is not read"),
        ({"llama__block_count": 1 << 30}, "damaged: its metadata do not fit its 1 tensors"),
        ({"llama__embedding_length": 64}, "damaged: its metadata do not fit its 1 tensors"),
        ({"llama__block_count": "1"}, "its metadata has no llama.block_count"),
    ],
)
def test_metadata_of_no_class_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        config_of(header_with(**fields), "x", lambda _: [])


def written_tokenizer(folder: Path, kind: str, tokenizer: Tokenizer, **fields: Any) -> Path:  # noqa: ANN401
    """A tokenizer as a file's metadata have it, made into a folder."""
    trained = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(trained["vocab"], key=trained["vocab"].__getitem__)
    writer = gguf.GGUFWriter(folder / "own.gguf", "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    special = {"<unk>": 2, "<s>": 3, "</s>": 3, "<|im_end|>": 3}
    bytes_ = {f"<0x{value:02X}>": 6 for value in range(256)}
    writer.add_token_types([(special | bytes_).get(token, 1) for token in tokens])
    if kind == "gpt2":
        writer.add_token_merges([" ".join(pair) for pair in trained["merges"]])
    else:
        writer.add_token_scores([-float(index) for index in range(len(tokens))])
    for name, value in fields.items():
        getattr(writer, name)(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_tokenizer(read_header(folder / "own.gguf"), "own", folder)
    return folder


def read_tokenizer(folder: Path) -> Any:  # noqa: ANN401
    from transformers import AutoTokenizer

    (folder / "config.json").write_text('{"model_type": "llama"}')
    return AutoTokenizer.from_pretrained(folder)


def test_digits_are_split_as_the_vocabulary_was_trained(tmp_path: Path) -> None:
    made = read_tokenizer(written_tokenizer(tmp_path, "gpt2", byte_level(), add_tokenizer_pre="smollm"))
    splits = made.backend_tokenizer.pre_tokenizer.pre_tokenize_str("in 2026")
    assert [text for text, _ in splits] == ["in", "Ġ", "2", "0", "2", "6"]


@pytest.mark.parametrize(
    ("split", "text", "pieces"),
    [
        ("deepseek-v3", "f(x) 12345 它们", ["f", "(x", ")", " ", "123", "45", " ", "它们"]),
        ("deepseek-coder", "ab 12\n", ["ab", " ", "1", "2", "\n"]),
        ("falcon", "in 20261, ok", ["in", " ", "202", "61", ",", " ok"]),
        ("bloom", "in 2026, ok", ["in", " 2026", ",", " ok"]),
        ("seed-coder", "I'm 12!\n", ["I", "'m", " ", "1", "2", "!", "\n"]),
        ("exaone-moe", "one two 12", ["one two", " ", "1", "2"]),
    ],
)
def test_texts_are_split_as_the_vocabulary_was_trained(
    split: str, text: str, pieces: list[str], tmp_path: Path
) -> None:
    made = read_tokenizer(written_tokenizer(tmp_path, "gpt2", byte_level(), add_tokenizer_pre=split))
    cut = made.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == pieces


def test_a_file_says_whether_texts_begin_with_a_token(tmp_path: Path) -> None:
    for number, (fields, begins) in enumerate(
        [
            ({"add_tokenizer_pre": "llama-bpe", "add_bos_token_id": 0}, True),
            ({"add_tokenizer_pre": "llama-bpe", "add_bos_token_id": 0, "add_add_bos_token": False}, False),
            ({"add_tokenizer_pre": "gpt-2", "add_bos_token_id": 0}, False),
            ({"add_tokenizer_pre": "gpt-2", "add_bos_token_id": 0, "add_add_bos_token": True}, True),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        ids = read_tokenizer(written_tokenizer(folder, "gpt2", byte_level(), **fields))("It was").input_ids
        assert (ids[0] == 0) == begins, fields


def test_sentence_pieces_with_and_without_the_first_space(tmp_path: Path) -> None:
    text = "two  spaces, 東京"
    for has_space in (True, False):
        folder = tmp_path / str(has_space)
        folder.mkdir()
        fields = {"add_add_space_prefix": has_space, "add_unk_token_id": 0, "add_add_bos_token": False}
        made = read_tokenizer(written_tokenizer(folder, "llama", byte_fallback(), **fields))
        ids = made(text).input_ids
        assert made.decode(ids) == text
        assert made.convert_ids_to_tokens(ids)[0].startswith("▁") == has_space


def test_tokens_that_end_a_turn_end_a_text(tmp_path: Path) -> None:
    fields = {"add_eos_token_id": 5, "add_eot_token_id": 7, "add_tokenizer_pre": "gpt-2"}
    folder = written_tokenizer(tmp_path, "gpt2", byte_level(), **fields)
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [5, 7]}


def test_kinds_of_tokenizers_that_are_not_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModel, match=r"its tokenizer is of kind 'rwkv', which is not read; read are gemma4, "
    ):
        written_tokenizer(tmp_path, "rwkv", byte_fallback())


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"layer_types": None, "rope_local_base_freq": None}),
        ({"gemma3__rope__local__freq_base": 5e3}, {"rope_local_base_freq": 5e3}),
        ({"gemma3__attention__sliding_window_pattern": 2}, {"layer_types": ["sliding_attention", "full_attention"]}),
        (
            {"gemma3__attention__sliding_window_pattern": [False, True]},
            {"layer_types": ["full_attention", "sliding_attention"]},
        ),
    ],
)
def test_windows_and_bases_are_the_files_own(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    """Where a file says nothing, config.json says nothing either: swarms know a model by it."""
    made = header_with(**fields)
    own = {key.replace("llama.", "gemma3."): value for key, value in made.metadata.items()}
    own |= {"general.architecture": "gemma3", "gemma3.block_count": 2}
    places = dict(made.tensors) | {"output_norm.weight": made.tensors["token_embd.weight"]}
    config = config_of(GgufHeader(own, places, 0), "x", lambda _: [])
    assert {name: config.get(name) for name in expected} == expected
