"""`python -m tools.site`: builds the documentation from docs/ into site/; every fault fails the build.

docs/ is copied to build/docs; the copy gets the generated parts (tools/reference.py) and the pages that lie elsewhere
in the repository. Links to other files of the repository become links to its public address, or plain text where it
has none. Zensical builds the copy; it refuses dead links, dead anchors and missing pages in the navigation. This module
refuses what Zensical accepts: missing pictures, pages outside the navigation, lists that Markdown does not recognise.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

from tools.reference import parts

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "deploy/README.md": "guides/deployment.md",
    "swarm/demo/README.md": "reference/demo-models.md",
}
"""Pages outside docs/, where a reader of the repository looks for them, with their place in the site."""

_LINK = re.compile(r"(?P<head>!?\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\()(?P<target>[^)\s]+)(?P<tail>[^)]*\))")
_GENERATED = re.compile(r"<!-- generated: (.+?) -->")
_FENCE = re.compile(r"^ *(```|~~~)")


class SiteError(Exception):
    """The documentation has faults; one line for each."""


def build(root: Path) -> Path:
    """Build the documentation of a checkout; returns the folder of the site.

    Raises:
        SiteError: dead links, pages outside the navigation and the like.
    """
    staged, site = root / "build" / "docs", root / "site"
    for old in (staged, site):
        shutil.rmtree(old, ignore_errors=True)
    stage(root, staged)
    command = (sys.executable, "-m", "zensical", "build", "--strict", "--clean")
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SiteError(_plain(done.stdout + done.stderr))
    check(site)
    return site


def stage(root: Path, staged: Path) -> None:
    """Copy the documentation to a folder that Zensical can build.

    Raises:
        SiteError: a link leads to no file, or a page includes a part that does not exist.
    """
    shutil.copytree(root / "docs", staged)
    places = (page.relative_to(root / "docs") for page in sorted((root / "docs").rglob("*.md")))
    pages = {root / "docs" / place: place for place in places}
    pages |= {root / page: Path(place) for page, place in ELSEWHERE.items() if (root / page).is_file()}
    stager = _Stager(root, pages)
    for source, place in pages.items():
        (staged / place).parent.mkdir(parents=True, exist_ok=True)
        (staged / place).write_text(stager.page(source), encoding="utf-8")
    if stager.faults:
        raise SiteError("\n".join(stager.faults))


class _Stager:
    """Converts pages for the copy.

    Attributes:
        faults: one line for each, with file and line.
    """

    def __init__(self, root: Path, pages: dict[Path, Path]) -> None:
        self._root = root
        self._pages = pages
        self._address = _public_address(root)
        self._parts = parts()
        self.faults: list[str] = []

    def page(self, source: Path) -> str:
        """The text of a page as it stands in the copy."""
        fenced = False
        lines = []
        for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), 1):
            if _FENCE.match(line):
                fenced = not fenced
            where = f"{source.relative_to(self._root)}:{number}"
            lines.append(line if fenced else self._line(line, source, where))
        return "\n".join(lines) + "\n"

    def _line(self, line: str, source: Path, where: str) -> str:
        if include := _GENERATED.fullmatch(line.strip()):
            if include[1] in self._parts:
                return self._parts[include[1]]()
            self.faults.append(f"{where}: no part is called {include[1]!r}; there are: {', '.join(self._parts)}")
        return _LINK.sub(lambda link: self._link(link, source, where), line)

    def _link(self, link: re.Match[str], source: Path, where: str) -> str:
        target, _, anchor = link["target"].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return link[0]
        leads_to = Path(os.path.normpath(source.parent / unquote(target)))
        if leads_to.is_dir() and leads_to / "index.md" in self._pages:
            leads_to /= "index.md"
        if not leads_to.exists():
            self.faults.append(f"{where}: dead link: {link['target']}")
            return link[0]
        here = self._pages[source].parent
        if leads_to in self._pages:
            there = os.path.relpath(self._pages[leads_to], here)
        elif leads_to.suffix != ".md" and leads_to.is_relative_to(self._root / "docs"):
            there = os.path.relpath(leads_to.relative_to(self._root / "docs"), here)
        elif self._address is not None:
            there = f"{self._address}/blob/main/{leads_to.relative_to(self._root)}"
        else:
            return _without_link(link["text"])
        return f"{link['head']}{there}{'#' + anchor if anchor else ''}{link['tail']}"


def _without_link(text: str) -> str:
    is_path = re.fullmatch(r"[\w./-]*[/.][\w./-]*", text) is not None
    return f"`{text}`" if is_path else text


def _public_address(root: Path) -> str | None:
    """The repository's public address from the package's metadata, None if it has none."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    urls = {name.lower(): url.rstrip("/") for name, url in project.get("urls", {}).items()}
    return next((urls[name] for name in ("repository", "source", "source code") if name in urls), None)


def check(site: Path) -> None:
    """Check the built site.

    Raises:
        SiteError: a page is not in the navigation, a picture is missing, or a list was not read as one.
    """
    faults = []
    in_navigation = set(Page.read(site / "index.html").navigation)
    for path in sorted(site.rglob("*.html")):
        name, page = path.relative_to(site).as_posix(), Page.read(path)
        if name != "404.html" and name not in in_navigation:
            faults.append(f"{name}: is not in the navigation: name it in docs/.nav.yml")
        faults += [f"{name}: no such picture: {source}" for source in page.pictures if not _exists(path, source)]
        faults += [f"{name}: a list needs an empty line before it: {text!r}" for text in page.broken_lists()]
    if faults:
        raise SiteError("\n".join(faults))


def _exists(page: Path, source: str) -> bool:
    return "://" in source or source.startswith("data:") or (page.parent / unquote(source)).exists()


class Page(HTMLParser):
    """The parts of a built page that are checked.

    Attributes:
        navigation: the pages that its navigation leads to.
        loads: every address from which it loads scripts, styles and the like, pictures too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.title = ""
        self.navigation: list[str] = []
        self.pictures: list[str] = []
        self.loads: list[str] = []
        self.paragraphs: list[str] = []
        self._inside: list[str] = []

    @classmethod
    def read(cls, path: Path) -> Page:
        page = cls()
        page.feed(path.read_text(encoding="utf-8"))
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what the element leads to or loads."""
        values = {name: value or "" for name, value in attrs}
        if tag == "a" and "md-nav__link" in values.get("class", ""):
            self.navigation.append(os.path.normpath(values.get("href", "").partition("#")[0]))
        if tag in {"img", "script", "iframe", "source", "video", "audio", "embed"} and "src" in values:
            self.loads.append(values["src"])
        if tag == "link" and "href" in values:
            self.loads.append(values["href"])
        if tag == "img":
            self.pictures.append(values.get("src", ""))
        if tag in {"p", "title"}:
            self._inside.append(tag)
            if tag == "p":
                self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        if self._inside and self._inside[-1] == tag:
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if self._inside and self._inside[-1] == "title":
            self.title += data
        elif self._inside:
            self.paragraphs[-1] += data

    def broken_lists(self) -> Iterator[str]:
        """Lines that begin like an item of a list and stand in a paragraph."""
        for text in self.paragraphs:
            yield from (found[0][:40] for found in re.finditer(r"(?m)(?<=\n)(?:[-*] |\d+\. ).*$", text))


def _plain(text: str) -> str:
    """Zensical's output without colours and stack traces."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return plain.partition("Traceback (most recent call last)")[0].strip()


def main() -> int:
    """Build this checkout's documentation; returns the exit code."""
    try:
        site = build(ROOT)
    except SiteError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the command line's own output
        return 1
    print(f"{site / 'index.html'}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
