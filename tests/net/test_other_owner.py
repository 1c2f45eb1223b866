"""Folders in the home that belong to somebody else, as after one `sudo`: every command says in one line what mends it.

The commands run as a user without the right to pass over permissions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Final

import pytest

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_program("setpriv", "util-linux")]

RIGHTS: Final = "-dac_override,-dac_read_search,-fowner"
PROGRAM: Final = """
import contextlib, importlib, io, json, sys, traceback

for line in json.loads(sys.argv[1]):
    module, *words = line.split()
    sys.argv, said, status = [module, *words], io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            importlib.import_module(f"{module}.cli").main()
        except SystemExit as end:
            status = end.code
        except BaseException:
            traceback.print_exc()
    sys.__stdout__.write(json.dumps([line, status, said.getvalue()]) + "\\n")
"""
FOLDERS: Final = {
    "swarm doctor": "~/.config",
    "node doctor": "~/.config",
    "node serve org/model": "{home}/.config",
    "swarm bootstrap --host 127.0.0.1 --port 0": "{home}/.config",
    "node status": "{home}/.local",
    "node files": "{home}/.cache",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit status and output of each command."""
    home = tmp_path_factory.mktemp("anna")
    for name in (".config", ".cache", ".local"):
        (home / name).mkdir(mode=0o700)
        os.chown(home / name, 65_534, 65_534)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "CANOPY_SWARMS"))}
    environment |= {"HOME": str(home), "HF_HOME": str(home / "hub"), "PYTHONPATH": os.getcwd()}
    rights = ("setpriv", "--bounding-set", RIGHTS)
    command = (*rights, sys.executable, "-c", PROGRAM, json.dumps(list(FOLDERS)))
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=50)
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    return {line: (status, text.replace(str(home), "{home}")) for line, status, text in found}


@pytest.mark.parametrize("line", FOLDERS)
def test_one_line_names_the_command_that_mends_it(line: str, said: dict[str, tuple[int, str]]) -> None:
    status, text = said[line]
    assert status == 1, text
    assert "Traceback" not in text
    (named,) = [one for one in text.splitlines() if "chown" in one]
    assert f'sudo chown -R "$USER" {FOLDERS[line]}' in named
