"""Whatever a resume file holds, it is an interrupted generation or one line that says that it is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.base.options import GenerateOptions, make_options
from client.terminal import resumption
from swarm.base.errors import ConfigError, GenerationInterrupted, Unfinished

SOUND: dict[str, object] = {
    "format": 1,
    "text": "once",
    "prompt": [1, 2],
    "tokens": [3],
    "options": {"max_new_tokens": 8, "seed": 7},
}
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.just(10**400),
    st.just(-5),
    st.lists(st.one_of(st.integers(), st.floats(), st.text(), st.just(10**400))),
    st.dictionaries(st.text(), st.integers()),
)
PLACES = st.sampled_from([*SOUND, *(f"options/{name}" for name in ("max_new_tokens", "seed", "stop", "top_p", "x"))])


def attempt(path: Path) -> None:
    """Load a file and check its options, as a resumed generation does."""
    try:
        found = resumption.load(path)
        assert found.unfinished is not None
        assert all(type(one) is int and one >= 0 for one in (*found.unfinished.prompt, *found.tokens))
        make_options(GenerateOptions(**found.unfinished.options)).check()  # type: ignore[typeddict-item]
    except ConfigError:
        pass


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept") / "file.json"


@given(st.dictionaries(PLACES, ODD, max_size=3))
def test_odd_values(path: Path, changes: dict[str, object]) -> None:
    content = json.loads(json.dumps(SOUND))
    for place, value in changes.items():
        *above, name = place.split("/")
        inner = content[above[0]] if above else content
        if isinstance(inner, dict):
            inner[name] = value
    path.write_text(json.dumps(content))
    attempt(path)


@given(st.integers(0, 80), st.binary(max_size=8))
def test_damaged_bytes(path: Path, at: int, damage: bytes) -> None:
    whole = json.dumps(SOUND).encode()
    path.write_bytes(whole[:at] + damage + whole[at + len(damage) :])
    attempt(path)
    path.write_bytes(whole[:at])
    attempt(path)


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        '{"format": 1e400}',
        '{"format": NaN}',
        json.dumps({**SOUND, "tokens": [-5]}),
        json.dumps({**SOUND, "tokens": [2**40]}),
        json.dumps({**SOUND, "prompt": "12"}),
        json.dumps({**SOUND, "prompt": [True]}),
        json.dumps({**SOUND, "options": []}),
        f'{{"format": 1, "text": "", "prompt": [{"1" * 5_000}], "tokens": [], "options": {{}}}}',
        '"x"' + " " * resumption.MAX_BYTES,
    ],
)
def test_what_is_none_is_one_line(content: str, path: Path) -> None:
    path.write_text(content)
    with pytest.raises(ConfigError, match="is not an interrupted generation"):
        resumption.load(path)


def test_a_file_is_kept_though_others_seem_newer(path: Path) -> None:
    """A clock that was ahead gave them their names."""
    folder = path.parent / "folder"
    folder.mkdir()
    for number in range(resumption.MAX_FILES):
        (folder / f"interrupted-99990101-0000{number:02}-1.json").write_text("{}")
    error = GenerationInterrupted("node Qm vanished", "once", (3,))
    error.unfinished = Unfinished((1, 2), {"seed": 7}, (3,))
    kept = resumption.save(error, folder)
    assert kept is not None
    assert resumption.load(kept).tokens == (3,)
    assert len(list(folder.iterdir())) == resumption.MAX_FILES
