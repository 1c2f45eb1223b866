"""What an outsider meets first: the public workflow, templates and hooks are valid and agree with the package."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

ROOT = Path(__file__).parents[3]
GITHUB = ROOT / ".github"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCHEMAS = (
    ("vendor.github-workflows", "workflows/ci.yml"),
    ("custom.github-workflows-require-timeout", "workflows/ci.yml"),
    ("vendor.github-issue-forms", "ISSUE_TEMPLATE/bug.yml"),
    ("vendor.github-issue-forms", "ISSUE_TEMPLATE/feature.yml"),
    ("vendor.github-issue-config", "ISSUE_TEMPLATE/config.yml"),
)


def run(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def targets(makefile: str) -> set[str]:
    return {name for names in re.findall(r"(?m)^([a-z ]+):", makefile) for name in names.split()}


@pytest.mark.parametrize(("schema", "file"), SCHEMAS)
def test_github_understands_it(schema: str, file: str) -> None:
    run("check_jsonschema", "--builtin-schema", schema, str(GITHUB / file))


def test_every_file_of_github_is_checked() -> None:
    assert {file for _, file in SCHEMAS} == {str(path.relative_to(GITHUB)) for path in GITHUB.rglob("*.yml")}


def test_hooks_are_valid() -> None:
    run("pre_commit", "validate-config", ".pre-commit-config.yaml")


def test_the_workflow_runs_every_python_that_the_package_names() -> None:
    prefix = "Programming Language :: Python :: 3."
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if line.startswith(prefix)]
    jobs = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())["jobs"]
    for job in ("check", "suite"):
        assert jobs[job]["strategy"]["matrix"]["python"] == named


def newest_release() -> str:
    """As the changelog has it."""
    (version, *_) = re.findall(r"(?m)^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text())
    return str(version)


def test_the_changelog_begins_with_this_version_or_what_is_to_become_it() -> None:
    own, newest = Version(PROJECT["version"]), Version(newest_release())
    assert own.is_devrelease or own == newest
    if own.is_devrelease:
        assert own > newest
        assert re.search(r"(?m)^## \[(.+)\]", (ROOT / "CHANGELOG.md").read_text())[1] == "Unreleased"  # type: ignore[index]


def test_security_fixes_are_promised_for_the_newest_release() -> None:
    minor = newest_release().rpartition(".")[0]
    assert f"| {minor} | yes |" in (ROOT / "SECURITY.md").read_text()


def test_contributing_names_targets_that_are_there() -> None:
    named = set(re.findall(r"`?make ([a-z]+)", (ROOT / "CONTRIBUTING.md").read_text()))
    assert {"install", "check", "test"} <= named <= targets((ROOT / "Makefile").read_text())


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_lead_somewhere(page: str) -> None:
    linked = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text())
    assert [link for link in linked if not (ROOT / link).exists()] == []
