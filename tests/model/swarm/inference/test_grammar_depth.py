"""Grammars of strangers in a process of their own: what overflows its stack would end this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import swarm

PATHS = (str(Path(swarm.__file__).parents[1]), os.environ.get("PYTHONPATH"))
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, PATHS))}
CHAINS = """
from swarm.demo import TARGET
from swarm.errors import ConfigError
from swarm.inference.grammar import GrammarCompiler
from swarm.protocol.pick_rules import Grammar
names = [f"{a}{b}{c}" for a in "abcdefghij" for b in "abcdefghijklmnopqrstuvwxyz" for c in "abcdefghijklmnopqrst"]
rules = [f"{one}:{two}" for one, two in zip(names, names[1:5000])]
text = chr(10).join(["start:aaa", *rules, names[4999] + ':"a"'])
references = ",".join(f'"{one}":{{"items":{{"$ref":"#/$defs/{two}"}}}}' for one, two in zip(names, names[1:1500]))
schema = f'{{"$defs":{{{references},"{names[1499]}":{{}}}},"$ref":"#/$defs/aaa"}}'
for grammar in (Grammar("lark", text), Grammar("lark", text.upper().replace("START", "start")),
                Grammar("json_schema", schema)):
    assert len(grammar.text) < 65536
    try:
        GrammarCompiler.of_folder(TARGET).compile(grammar)
    except ConfigError as error:
        print(error)
print("alive")
"""


def test_a_long_chain_of_rules_ends_no_process() -> None:
    """The library follows one by recursion, down a stack that no exception guards."""
    done = subprocess.run([sys.executable, "-c", CHAINS], capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert "alive" in done.stdout
