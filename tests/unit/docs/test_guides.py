"""The guides against the programs: links, options, quoted messages; and the follower's own reading of a guide."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

import client.cli
import node.cli
import swarm.cli
from client.base.options import Options
from tools.follow import in_order
from tools.guide import GuideError, is_shown, read
from tools.pictures import FOLDER, chain, commit, pipe, repair, tree

ROOT = Path(__file__).parents[3]
GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))
PAGES = [*GUIDES, ROOT / "docs/index.md"]
CONFIGS = (
    Options,
    *client.cli.COMMANDS.values(),
    *node.cli.COMMANDS.values(),
    *swarm.cli.COMMANDS.values(),
)
SHORTEST = 8
"""A shorter fragment of a message proves nothing."""
OTHERS_OPTIONS = {"quick", "silent", "fail", "no-hardlinks", "now", "user", "schema", "functions", "bare", "tools"}
TYPED = {"program": "for"}
"""Options that are typed by another name than their field's."""


def options() -> set[str]:
    """What our commands know, as it is typed."""
    names = {
        TYPED.get(field.name, field.name).replace("_", "-")
        for config in CONFIGS
        for field in dataclasses.fields(config)
    }
    return names | {f"no-{name}" for name in names}


def sources() -> str:
    """Every message in the code, without the seams of strings that are split over lines."""
    files = [path for folder in ("swarm", "node", "client") for path in (ROOT / folder).rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    return re.sub(r"\s+", " ", re.sub(r'"\s*\n\s*f?"', "", text))


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).resolve().exists(), f"{page.name}: {target}"


def test_every_option_exists() -> None:
    known = options() | OTHERS_OPTIONS
    for guide in GUIDES:
        named = set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*)", guide.read_text(encoding="utf-8")))
        assert named <= known, f"{guide.name}: {named - known}"


def test_quoted_messages_are_the_programs_own() -> None:
    """The tables of trouble quote what the programs say; … stands for what differs."""
    said = sources()
    for name in ("volunteer.md", "user.md"):
        table = (ROOT / "docs/guides" / name).read_text(encoding="utf-8").partition("## When it does not work")[2]
        quotes = re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)
        assert len(quotes) > 8
        for quote in quotes:
            parts = [part.strip(" ;:,()") for part in quote.split("…")]
            long = [part for part in parts if len(part) >= SHORTEST]
            assert long, quote
            assert all(part in said for part in long), f"{name}: {quote}"


def test_every_guide_can_be_read_and_comes_after_what_it_needs() -> None:
    found = [guide.path.name for guide in in_order([ROOT / "docs/guides/user.md"])]
    assert found == ["operator.md", "volunteer.md", "user.md"]
    for guide in GUIDES:
        for block in read(guide).blocks:
            assert block.file is not None or block.steps()


GUIDE = """
<!-- after: first.md -->
text
<!-- run: anna, stays -->
```console
$ node serve model \\
      --layers 0-4
serving at 203.0.113.11:31338
…
```
<!-- run: you, slow -->
```console
$ client chat
› hello
› /quit
tokens/s
$ true
```
<!-- by hand: needs the internet -->
```console
$ make install
```
<!-- run: you, file story.py -->
```python
print(1)
```
<!-- run: anna -->
```console
^C
waiting
```
```
no language, nobody's
```
"""


def test_a_guide_is_read(tmp_path: Path) -> None:
    path = tmp_path / "guide.md"
    path.write_text(GUIDE, encoding="utf-8")
    guide = read(path)
    assert guide.after == (tmp_path / "first.md",)
    serve, chat, file, interrupt = guide.blocks
    (step,) = serve.steps()
    assert (step.command, step.shown, step.line) == (
        "node serve model --layers 0-4",
        ["serving at 203.0.113.11:31338"],
        6,
    )
    assert (serve.host, set(serve.flags)) == ("anna", {"stays"})
    first, second = chat.steps()
    assert (first.typed, first.shown, second.command) == (["hello", "/quit"], ["tokens/s"], "true")
    assert (file.file, file.text) == ("story.py", ("print(1)",))
    assert [(step.command, step.shown) for step in interrupt.steps()] == [(None, ["waiting"])]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("```console\n$ true\n```\n", "says neither who runs this nor why nobody does"),
        ("<!-- run: you, quickly -->\n```console\n$ true\n```\n", "quickly: no such mark"),
        ("<!-- run: you -->\nwords\n", "a block should follow"),
    ],
)
def test_a_guide_that_cannot_be_followed_says_where(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "guide.md"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(GuideError, match=says):
        read(path)


def test_what_is_shown_before_anything_is_typed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "guide.md"
    path.write_text("<!-- run: you -->\n```console\nserving\n```\n", encoding="utf-8")
    (block,) = read(path).blocks
    with pytest.raises(GuideError, match="nothing was typed"):
        block.steps()


@pytest.mark.parametrize(
    ("line", "output", "fits"),
    [
        ("loaded 9.0 MiB in 0.1 s", "model: x\nloaded 12.5 MiB in  13 s\n", True),
        ("loaded 9.0 MiB in 0.1 s", "loaded 9.0 GiB in 0.1 s", False),
        ("serving at … as Qm…", "serving at 203.0.113.11:1 as QmXyz", True),
        ("0…3 of 12  serving", "│ 0…3 of 12 │ serving │", True),
        ("1,024 / 2", "│ 262,144 / 262,144 │", True),
        ("every layer is served", "nobody serves layers", False),
    ],
)
def test_what_is_shown_is_compared_loosely(line: str, output: str, fits: bool) -> None:
    assert is_shown(line, output) is fits


def test_pictures_are_those_of_the_record() -> None:
    record = json.loads((FOLDER / "sweep.json").read_text(encoding="utf-8"))
    drawings = {
        "tree": tree(record),
        "chain": chain(record),
        "commit": commit(record),
        "pipe": pipe(),
        "repair": repair(),
    }
    for name, drawing in drawings.items():
        assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == drawing.svg(), (
            f"run python -m tools.pictures: {name}"
        )
