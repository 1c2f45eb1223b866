"""A GGUF model as a folder of transformers': config, tokenizer and links to its files, made once, kept in the cache.

    CACHE/gguf/KEY/NAME/   config.json, tokenizer.json, … , gguf.json (where each tensor lies), FILE.gguf ─▶ the file

So whatever reads a model's folder reads a GGUF model's. A folder appears whole or not at all; the oldest ones go.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from swarm.base.errors import ConfigError, UnsupportedModel
from swarm.base.files import cache_folder, replace_file
from swarm.base.ids import model_name
from swarm.base.version import VERSION
from swarm.files.gguf.config import config_of
from swarm.files.gguf.container import GgufHeader, TensorPlace, read_header
from swarm.files.gguf.encodings import ENCODINGS
from swarm.files.gguf.naming import SUFFIX, stem_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenizers import Tokenizer

    from swarm.files.gguf.container import MetadataValue


BYTE_LEVEL: Final = "gpt2"
SENTENCE_PIECE: Final = "llama"

AS_GPT2: Final = {"exaone4", "gpt-2", "granite-docling", "mellum", "mpt", "olmo", "phi-2", "trillion"}
"""Splits (`tokenizer.ggml.pre`) that are GPT-2's."""
DIGIT_BY_DIGIT: Final = {"codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"}
"""Splits that are GPT-2's behind one at each digit."""
AS_LLAMA3: Final = {"chatglm-bpe", "glm4", "glm5"}
AS_QWEN2: Final = {"hunyuan", "solar-open", "stablelm2"}
_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_DEEPSEEK: Final = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
SPLITS: Final[Mapping[str, tuple[str, ...]]] = {
    "bloom": (r" ?[^(\s|.,!?…。，、।۔،)]+",),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    "deepseek-v3": _DEEPSEEK,
    "exaone-moe": (
        _ENDINGS + r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]"
        r"|\s+(?!\S)|\s+",
    ),
    "falcon": (
        r"[\p{P}\$\+<=>\^~\|`]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        "[0-9][0-9][0-9]",
    ),
    "hunyuan-dense": _DEEPSEEK,
    "joyai-llm": _DEEPSEEK,
    "seed-coder": (_ENDINGS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",),
}
"""Splits of which transformers has none: expressions that cut pieces out, one after the other.

Source: llama.cpp, `llama-vocab.cpp`.
"""
UNSPLIT: Final = {"", "default"}
"""Files of before splits were written: llama.cpp guesses for them too."""

BEGUN: Final = {
    "falcon-h1", "falcon3", "lfm2", "llama-bpe", "llama-v3", "llama3", "midm-2.0", "pixtral", "tekken",
}  # fmt: skip
"""Splits of vocabularies whose texts begin with a token of their own unless a file says no, and whose whole words are
taken before any merge."""

WHOLE_WORDS: Final = {"glm4", "glm5"}
"""Splits of other vocabularies whose whole words are taken before any merge."""
CONTROL: Final = 3
"""The type of a token that stands for no text."""
ENDS: Final = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
    "<EOT>", "<|END_OF_TURN_TOKEN|>", "<|end_of_text|>", "<|end_of_role|>",
}  # fmt: skip
"""Control tokens that end a text or a turn, whether or not the metadata name them.

Source: llama.cpp, `llama-vocab.cpp`.
"""

SPECIAL: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


logger = logging.getLogger(__name__)
POINTER: Final = "gguf.json"
"""Names the files of a model and where each tensor lies in them."""
FORMAT: Final = 3
"""Of these folders; another one is made anew."""
MAX_FOLDERS: Final = 16
MAX_NOTES: Final = 64
MAX_VECTOR: Final = 4096
"""Values of a small tensor that belongs to the config, at most."""
ReadBytes = Callable[[int, int], bytes]
"""Reads so many bytes of a file, from a place in it."""


def write_tokenizer(header: GgufHeader, name: str, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, a chat template if there is one, and generation_config.json.

    Raises:
        UnsupportedModel: the vocabulary is of a kind that is not read, or damaged.
        OSError: a file cannot be written.
    """
    # Here, because these take a second to import, and most models need none of them.
    from transformers import PreTrainedTokenizerFast

    tokens = _texts(header, "tokens", name)
    try:
        backend = _backend(header, name)
        make: Any = PreTrainedTokenizerFast
        fast = make(tokenizer_object=backend, **_settings(header, tokens))
    except UnsupportedModel:
        raise
    except Exception as error:  # what transformers and tokenizers raise on a damaged vocabulary may be anything
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UnsupportedModel(f"{name}: its tokenizer cannot be read ({reason})") from error
    fast.save_pretrained(folder)
    ends = end_ids(header, tokens)
    generation = {"eos_token_id": ends} if ends else {}
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")


def end_ids(header: GgufHeader, tokens: list[str]) -> list[int]:
    """Ids that end a text: those that the metadata name, and control tokens that always do."""
    named = [header.number(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    kinds = header.metadata.get("tokenizer.ggml.token_type")
    types = kinds if isinstance(kinds, list) else []
    usual = [index for index, (token, kind) in enumerate(zip(tokens, types, strict=False)) if _ends(token, kind)]
    return list(dict.fromkeys([*(one for one in named if one is not None), *usual]))


def _ends(token: str, kind: MetadataValue) -> bool:
    return kind == CONTROL and token in ENDS


def _texts(header: GgufHeader, key: str, name: str) -> list[str]:
    value = header.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise UnsupportedModel(f"{name}: its metadata has no tokenizer.ggml.{key}; convert it again")
    return [str(one) for one in value]


def _backend(header: GgufHeader, name: str) -> Tokenizer:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_PRE_TOKENIZER_SPLITS,
        GGUF_TOKENIZER_MAPPING,
        GGUF_TOKENIZER_TYPES,
        convert_gguf_tokenizer,
    )

    kind, split = header.text("tokenizer.ggml.model"), header.text("tokenizer.ggml.pre")
    if kind not in GGUF_TOKENIZER_TYPES:
        known = ", ".join(sorted(GGUF_TOKENIZER_TYPES))
        raise UnsupportedModel(f"{name}: its tokenizer is of kind {kind!r}, which is not read; read are {known}")
    keys = {f"tokenizer.{key}": title for key, title in GGUF_TOKENIZER_MAPPING["tokenizer"].items()}
    vocabulary = {title: header.metadata[key] for key, title in keys.items() if key in header.metadata}
    known_splits = {*GGUF_PRE_TOKENIZER_SPLITS, *AS_GPT2, *DIGIT_BY_DIGIT, *AS_LLAMA3, *AS_QWEN2, *SPLITS, *UNSPLIT}
    if kind == BYTE_LEVEL and split not in known_splits:
        known = ", ".join(sorted(known_splits - UNSPLIT))
        raise UnsupportedModel(f"{name}: its text is split by {split!r}, which is not known; known are {known}")
    if kind == BYTE_LEVEL and split in UNSPLIT:
        logger.warning("%s: the file does not say how its text is split; it is split as GPT-2's", name)
    if split in AS_LLAMA3 | AS_QWEN2:
        vocabulary["pre_tokenizer_type"] = "llama3" if split in AS_LLAMA3 else "qwen2"
    backend: Tokenizer = convert_gguf_tokenizer(header.text("general.architecture"), vocabulary)[0]
    _complete(backend, kind, split, has_space=header.metadata.get("tokenizer.ggml.add_space_prefix") is not False)
    return backend


def _complete(backend: Tokenizer, kind: str, split: str, *, has_space: bool) -> None:
    from tokenizers import Regex, decoders, pre_tokenizers

    parts: Any = backend
    if kind == BYTE_LEVEL and split in DIGIT_BY_DIGIT:
        digits = pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated")
        parts.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if kind == BYTE_LEVEL and split in SPLITS:
        cuts: list[Any] = [pre_tokenizers.Split(Regex(one), behavior="isolated") for one in SPLITS[split]]
        bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        parts.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_alone])
    if kind == BYTE_LEVEL and split in BEGUN | WHOLE_WORDS:
        parts.model.ignore_merges = True
    if kind == SENTENCE_PIECE and not has_space and isinstance(parts.pre_tokenizer, pre_tokenizers.Metaspace):
        parts.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
        parts.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def _settings(header: GgufHeader, tokens: list[str]) -> dict[str, Any]:
    """Special tokens, what is put before and behind a text, and the chat template."""
    kind, split = header.text("tokenizer.ggml.model"), header.text("tokenizer.ggml.pre")
    settings: dict[str, Any] = {}
    for title, key in SPECIAL.items():
        token = header.number(f"tokenizer.ggml.{key}_token_id")
        if token is not None and 0 <= token < len(tokens):
            settings[title] = tokens[token]
    begins = header.metadata.get("tokenizer.ggml.add_bos_token")
    if begins is None:
        begins = kind == SENTENCE_PIECE or (kind == BYTE_LEVEL and split in BEGUN)
    settings["add_bos_token"] = bool(begins) and "bos_token" in settings
    settings["add_eos_token"] = header.metadata.get("tokenizer.ggml.add_eos_token") is True and "eos_token" in settings
    if template := header.text("tokenizer.chat_template"):
        settings["chat_template"] = template
    return settings


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A file of a model.

    Attributes:
        target: where the file is, or comes to be.
        read: reads some of its bytes.
    """

    name: str
    target: Path
    size_bytes: int
    header: GgufHeader
    read: ReadBytes


@dataclass(frozen=True, slots=True)
class TensorTable:
    """Where the tensors of a model lie.

    Attributes:
        family: the model's architecture, as the file has it.
        sizes: bytes of each file, by its name in the model's folder.
        places: file and place of each tensor, by llama.cpp's names.
    """

    family: str
    sizes: Mapping[str, int]
    places: Mapping[str, tuple[str, TensorPlace]]

    def first_byte(self, file: str) -> int:
        """Where the first tensor of a file begins, behind its header."""
        return min((place.start for name, place in self.places.values() if name == file), default=self.sizes[file])

    @classmethod
    def of(cls, family: str, files: Sequence[GgufFile]) -> TensorTable:
        """The table of some files.

        Raises:
            UnsupportedModel: two files have one tensor.
        """
        places: dict[str, tuple[str, TensorPlace]] = {}
        for file in files:
            if twice := sorted(places.keys() & file.header.tensors.keys()):
                raise UnsupportedModel(f"{file.target}: {twice[0]} lies in two of the model's files; fetch them again")
            places |= {name: (file.name, place) for name, place in file.header.tensors.items()}
        return cls(family, {file.name: file.size_bytes for file in files}, places)

    @classmethod
    def read(cls, folder: Path) -> TensorTable:
        """The table that a folder was made with."""
        content = json.loads((folder / POINTER).read_text(encoding="utf-8"))
        places = {
            name: (file, TensorPlace(name, tuple(shape), ENCODINGS[kind], start))
            for name, file, shape, kind, start in content["tensors"]
        }
        return cls(content["family"], content["files"], places)

    def write(self, folder: Path) -> None:
        rows = [
            [name, file, list(place.shape), place.encoding.kind, place.start]
            for name, (file, place) in self.places.items()
        ]
        content = {"family": self.family, "files": dict(self.sizes), "tensors": rows}
        (folder / POINTER).write_text(json.dumps(content), encoding="utf-8")


def local_folder(files: Sequence[Path]) -> Path:
    """The folder of a model whose files are on this machine.

    Raises:
        UnknownModel: a file cannot be read.
        UnsupportedModel: they are no model that runs, or damaged.
        ConfigError: the cache cannot be written.
    """
    name = model_name(stem_of(files[0].name))
    stamps = [[str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]

    def opened() -> list[GgufFile]:
        return [
            GgufFile(
                f"{file.name.removesuffix(SUFFIX)}{SUFFIX}",
                file.absolute(),
                file.stat().st_size,
                read_header(file),
                _reader_of(file),
            )
            for file in files
        ]

    return model_folder(name, stamps, opened)


def model_folder(name: str, key: object, files: Callable[[], Sequence[GgufFile]]) -> Path:
    """The folder of a model, made if it is not there.

    Args:
        key: what tells this model from others, as JSON.
        files: opens its files, the first one first.

    Raises:
        UnsupportedModel: they are no model that runs, or damaged.
        ConfigError: the cache cannot be written.
    """
    import transformers  # here, because it takes a second to import

    stamp = json.dumps([FORMAT, VERSION, transformers.__version__, name, key], sort_keys=True)
    root = cache_folder() / "gguf"
    place = root / hashlib.sha256(stamp.encode()).hexdigest()[:32]
    folder = place / Path(name).name
    try:
        if (folder / POINTER).exists():
            os.utime(place)
            return folder
        root.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=root))
        try:
            (draft / folder.name).mkdir()
            _fill(draft / folder.name, name, files())
            _put(draft, place)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        _forget_old(root)
    except OSError as error:
        raise ConfigError(f"{root}: cannot be written ({error.strerror or error}); set XDG_CACHE_HOME") from error
    return folder


def remember(asked: str, folder: Path, commit: str, part: str) -> None:
    """Note which folder a name on the hub led to, for when the hub cannot be reached; without a note there is none."""
    names = cache_folder() / "gguf-names"
    try:
        names.mkdir(parents=True, exist_ok=True)
        replace_file(_note(asked), json.dumps([str(folder), commit, part]).encode())
        for old in sorted(names.iterdir(), key=lambda note: note.stat().st_mtime, reverse=True)[MAX_NOTES:]:
            old.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s: the name %s is not kept (%s)", names, asked, error.strerror or error)


def remembered(asked: str) -> tuple[Path, str, str] | None:
    """The folder, commit and part that a name led to, if the folder is still there."""
    try:
        folder, commit, part = json.loads(_note(asked).read_bytes())
    except (OSError, ValueError, TypeError):
        return None
    return (Path(folder), str(commit), str(part)) if (Path(folder) / POINTER).exists() else None


def _note(asked: str) -> Path:
    return cache_folder() / "gguf-names" / hashlib.sha256(asked.encode()).hexdigest()[:32]


def merged(files: Sequence[GgufFile], name: str) -> GgufHeader:
    """One header with the metadata of the first file and the tensors of all.

    Raises:
        UnsupportedModel: the files are not the parts of one model.
    """
    for index, file in enumerate(files):
        number, count = file.header.number("split.no") or 0, file.header.number("split.count") or 1
        if (number, count) != (index, len(files)) and count > 1:
            raise UnsupportedModel(
                f"{file.target}: part {number + 1} of {count}, by its own word, and {index + 1} of {len(files)} by its "
                "name; give all parts their names back"
            )
    table = TensorTable.of("", files)
    header = files[0].header
    places = {title: place for title, (_, place) in table.places.items()}
    total = header.number("split.tensors.count")
    if total is not None and len(files) > 1 and total != len(places):
        raise UnsupportedModel(f"{name}: its parts have {len(places)} tensors instead of {total}; fetch them again")
    return GgufHeader(header.metadata, places, header.size_bytes)


def _fill(folder: Path, name: str, files: Sequence[GgufFile]) -> None:
    header = merged(files, name)
    owner = {title: file for file in files for title in file.header.tensors}

    def vector(title: str) -> Sequence[float]:
        place = header.tensors.get(title)
        if place is None or place.encoding.name != "f32" or place.size_bytes > 4 * MAX_VECTOR:
            raise UnsupportedModel(f"{name}: {title} is missing, or of a form that is not read; convert it again")
        return struct.unpack(f"<{place.size_bytes // 4}f", owner[title].read(place.start, place.size_bytes))

    config: dict[str, Any] = config_of(header, name, vector)
    write_tokenizer(header, name, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    TensorTable.of(header.text("general.architecture"), files).write(folder)
    for file in files:
        (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
        (folder / file.name).symlink_to(file.target)


def _put(draft: Path, place: Path) -> None:
    try:
        draft.rename(place)
    except OSError:
        if not place.is_dir():
            raise  # else another program was faster


def _forget_old(root: Path) -> None:
    """Remove the folders that were opened longest ago."""
    made = sorted(_places(root), key=lambda place: place.stat().st_mtime, reverse=True)
    for place in made[MAX_FOLDERS:]:
        shutil.rmtree(place, ignore_errors=True)


def _places(root: Path) -> Iterator[Path]:
    return (path for path in root.iterdir() if not path.name.startswith("."))


def _reader_of(file: Path) -> ReadBytes:
    def read(start: int, count: int) -> bytes:
        with file.open("rb") as opened:
            opened.seek(start)
            return opened.read(count)

    return read
