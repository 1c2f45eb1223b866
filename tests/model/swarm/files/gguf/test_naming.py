"""Which GGUF files are meant by what a user types."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.base.errors import UnknownModel
from swarm.base.ids import ModelIdentity, is_model_name
from swarm.files.gguf.naming import hub_files, hub_name, is_safe, local_files, split_hub_name

REPO = "org/Tiny-GGUF"
FILES = [
    "README.md",
    "Tiny-BF16.gguf",
    "Tiny-IQ4_XS.gguf",
    "Tiny-Q4_K_M.gguf",
    "Tiny-Q4_K_S.gguf",
    "Tiny-UD-Q4_K_XL.gguf",
    "Tiny.Q4_1.gguf",
    "mmproj-Tiny-F16.gguf",
    "Q8_0/Tiny-Q8_0-00001-of-00002.gguf",
    "Q8_0/Tiny-Q8_0-00002-of-00002.gguf",
]
Q8 = FILES[-2:]


@pytest.mark.parametrize(
    ("part", "files"),
    [
        ("Q4_K_M", ["Tiny-Q4_K_M.gguf"]),
        ("q4_k_m", ["Tiny-Q4_K_M.gguf"]),
        ("Q4_1", ["Tiny.Q4_1.gguf"]),
        ("IQ4_XS", ["Tiny-IQ4_XS.gguf"]),
        ("UD-Q4_K_XL", ["Tiny-UD-Q4_K_XL.gguf"]),
        ("Tiny-Q4_K_S.gguf", ["Tiny-Q4_K_S.gguf"]),
        ("Tiny-Q4_K_S", ["Tiny-Q4_K_S.gguf"]),
        ("Q8_0", Q8),
        (Q8[0], Q8),
        ("Tiny-Q8_0", Q8),
        ("mmproj-Tiny-F16.gguf", ["mmproj-Tiny-F16.gguf"]),
    ],
)
def test_a_part_names_a_file_or_how_it_ends(part: str, files: list[str]) -> None:
    assert hub_files(REPO, part, FILES) == files


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("Q5_K_M", "no file 'Q5_K_M'; it has org/Tiny-GGUF:Q8_0, org/Tiny-GGUF:BF16, org/Tiny-GGUF:IQ4_XS"),
        ("K_M", "no file 'K_M'"),
        ("XS", "no file 'XS'"),
        ("", "which of its GGUF files? it has org/Tiny-GGUF:Q8_0"),
    ],
)
def test_what_names_none_or_several_lists_what_there_is(part: str, said: str) -> None:
    with pytest.raises(UnknownModel) as caught:
        hub_files(REPO, part, [name for name in FILES if name != "Tiny-UD-Q4_K_XL.gguf"])
    assert said in str(caught.value)
    assert "mmproj" not in str(caught.value)


def test_a_repository_with_one_file_needs_no_part() -> None:
    assert hub_files(REPO, "", ["README.md", "a.gguf"]) == ["a.gguf"]
    with pytest.raises(UnknownModel, match="no GGUF files"):
        hub_files(REPO, "Q4_0", ["model.safetensors"])


def test_a_part_of_two_files_is_not_taken() -> None:
    with pytest.raises(UnknownModel, match=r"several files 'Q4_0': a-Q4_0\.gguf, b-Q4_0\.gguf"):
        hub_files(REPO, "Q4_0", ["a-Q4_0.gguf", "b-Q4_0.gguf"])


def test_a_missing_part_of_a_split_file_is_named() -> None:
    with pytest.raises(UnknownModel, match="1 of its 2 parts are missing, such as Q8_0/Tiny-Q8_0-00002"):
        hub_files(REPO, "Q8_0", FILES[:-1])
    with pytest.raises(UnknownModel, match="99999 parts of one model cannot be"):
        hub_files(REPO, "x", ["x-00001-of-99999.gguf"])


@pytest.mark.parametrize("name", ["Tiny-Q4_K_M.gguf", "Tiny.Q4_1.gguf", Q8[0], "Tiny-UD-Q4_K_XL.gguf"])
def test_a_name_in_the_swarm_finds_the_same_file(name: str) -> None:
    called = hub_name(REPO, name, FILES)
    assert is_model_name(called)
    repo, part = split_hub_name(called) or ("", "")
    assert repo == REPO
    assert hub_files(repo, part, FILES)[0] == name


def test_where_two_files_have_one_quantisation_the_file_is_the_name() -> None:
    both = ["a-Q4_0.gguf", "b-Q4_0.gguf"]
    assert hub_name(REPO, both[0], both) == f"{REPO}:a-Q4_0"
    assert hub_name(REPO, "model.gguf", ["model.gguf"]) == f"{REPO}:model"


def test_files_on_this_machine(tmp_path: Path) -> None:
    assert local_files(tmp_path) is None
    assert local_files(Path("org/model")) is None
    one = tmp_path / "one.gguf"
    one.touch()
    assert local_files(one) == local_files(tmp_path) == [one]
    (tmp_path / "config.json").touch()
    (tmp_path / "mmproj-one.gguf").touch()
    assert local_files(tmp_path) == [one]
    (tmp_path / "two.GGUF").touch()
    with pytest.raises(UnknownModel, match=r"it has several GGUF files: one\.gguf, two\.GGUF; give one of them"):
        local_files(tmp_path)
    assert local_files(tmp_path / "two.GGUF") == [tmp_path / "two.GGUF"]
    (tmp_path / "model.safetensors").touch()
    assert local_files(tmp_path) is None, "a model of transformers that a GGUF lies beside"


def test_a_file_of_any_name_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    """Ollama calls a file by its digest."""
    blob = tmp_path / f"sha256-{'0a' * 32}"
    blob.write_bytes(b"GGUF and more")
    assert local_files(blob) == [blob]
    blob.write_bytes(b"no such file")
    assert local_files(blob) is None


@pytest.mark.parametrize("names", [["x.gguf.part1of2", "x.gguf.part2of2"], ["x.gguf-split-a", "x.gguf-split-b"]])
def test_a_file_in_pieces_is_refused_with_how_to_join_them(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"GGUF")
    said = rf": x\.gguf lies in pieces; fetch all and join them: cat {names[0]} {names[1]} > x\.gguf$"
    for model in (tmp_path / names[0], tmp_path / names[1], tmp_path):
        with pytest.raises(UnknownModel, match=said):
            local_files(model)
    with pytest.raises(UnknownModel, match=f"^{REPO}{said}"):
        hub_files(REPO, "", names)


@pytest.mark.parametrize("name", ["../x.gguf", "/etc/x.gguf", "a/../x.gguf", "a//x.gguf", "-x.gguf", "a/b/c/d/e.gguf"])
def test_names_that_are_paths_elsewhere_are_not_safe(name: str) -> None:
    assert not is_safe(name)
    assert is_safe("Q4_K_M/Tiny-Q4_K_M-00001-of-00002.gguf")


@pytest.mark.parametrize(
    ("query", "is_called"),
    [
        ("org/Tiny-GGUF:Q4_1", True),
        ("org/Tiny-GGUF", False),
        ("org/Tiny-GGUF:Q8_0", False),
        ("other/Tiny-GGUF:Q4_1", False),
    ],
)
def test_a_model_of_the_hub_is_called_by_its_file(query: str, is_called: bool) -> None:
    assert ModelIdentity.of("org/Tiny-GGUF:Q4_1", "a", "b", "c", 3).is_called(query) == is_called


@pytest.mark.parametrize("query", ["Tiny.Q4_1", "/models/Tiny.Q4_1.gguf", "Tiny.Q4_1-00001-of-00003.gguf"])
def test_a_model_in_a_file_is_called_by_it(query: str) -> None:
    assert ModelIdentity.of("Tiny.Q4_1", "a", "b", "c", 3).is_called(query)


@pytest.mark.parametrize("name", ["org/x:", "org/x:a:b", ":a", "org/x:a/b", "x:..", "org/x: a"])
def test_a_colon_stands_once_before_a_plain_word(name: str) -> None:
    assert not is_model_name(name)
