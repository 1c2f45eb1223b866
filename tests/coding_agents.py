"""`python -m tests.coding_agents [URL]`: the real Codex and Claude Code against `client api`, where they are installed.

    npm install --prefix FOLDER @openai/codex @anthropic-ai/claude-code    # 660 MB, which is why no test runs them
    PATH=FOLDER/node_modules/.bin:$PATH .venv/bin/python -m tests.coding_agents

Each is started with what `client api --for` prints, in a home and a project of its own. Without a URL it asks the real
application with a stand-in for the model: one question, and one call of its shell. With the URL of a `client api` that
runs, it asks that one the question and shows the answer. Returns 1 if anything is missing from an answer.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from client.api.app import build_app
from client.api.backend import ChatJob, Job
from client.dialogue.messages import ToolCallDelta
from client.terminal.setups import ProgramName, ServerModel, ask_server, setup
from tests.api_server import served
from tests.scripted_backend import CARD, ScriptedBackend, Step, steps

QUESTION: Final = "What is the capital of France? Answer in one sentence."
ORDER: Final = "Run the command and say what it prints."
SHELLS: Final[Mapping[str, str]] = {"exec_command": "cmd", "Bash": "command"}
"""Each agent's shell, and the argument that takes the command."""
COMMAND: Final = "echo $((6 * 7))"
LIMIT_S: Final = 600.0
SMALL_TOKENS: Final = 32_000


@dataclass(frozen=True, slots=True)
class Agent:
    """A program, and how it is asked one thing.

    Attributes:
        command: its name.
        program: as `client api --for` knows it.
        arguments: before what it is asked.
        small: further ones where the model's context is below `SMALL_TOKENS`.
    """

    command: str
    program: ProgramName
    arguments: tuple[str, ...]
    small: tuple[str, ...] = ()

    def ask(self, prompt: str, model: ServerModel) -> str:
        """Everything that it prints."""
        with tempfile.TemporaryDirectory() as home:
            project = Path(home) / "project"
            project.mkdir()
            variables = {
                "PATH": os.environ["PATH"],
                "HOME": home,
                "TERM": "dumb",
                **self._configured(Path(home), model),
            }
            arguments = [
                self.command,
                *self.arguments,
                *(self.small if model.context_length < SMALL_TOKENS else ()),
                prompt,
            ]
            try:
                done = subprocess.run(
                    arguments, cwd=project, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return f"(nothing within {LIMIT_S:.0f} s)"
        return done.stdout.decode(errors="replace")

    def _configured(self, home: Path, model: ServerModel) -> dict[str, str]:
        """Write its configuration; the value is what goes into its environment."""
        text = setup(self.program, model)
        if self.program == "codex":
            (home / ".codex").mkdir()
            (home / ".codex/config.toml").write_text(text)
            return {}
        words = [shlex.split(line, comments=True) for line in text.splitlines()]
        return dict(found[1].split("=", 1) for found in words if found)


AGENTS: Final = (
    Agent("codex", "codex", ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")),
    Agent("claude", "claude", ("--allowedTools=Bash", "-p"), ("--bare",)),
)


def stand_in(job: Job) -> Iterable[Step]:
    """What the model says: an answer, a call of the shell where it is ordered, and what that printed."""
    assert isinstance(job, ChatJob)
    asked = "".join(message.content for message in job.messages if message.role == "user")
    last = job.messages[-1]
    shell = next((tool.name for tool in job.tools if tool.name in SHELLS), None)
    if last.role == "tool":
        return steps("It prints ", last.content.split()[-1], ".")
    if ORDER in asked and shell is not None:
        return steps(ToolCallDelta(0, "call_1", shell, json.dumps({SHELLS[shell]: COMMAND})), reason="tool_calls")
    return steps("Paris, ", "says the swarm.")


def main(url: str | None) -> int:
    """Ask every agent that is installed; returns the exit code."""
    agents = [agent for agent in AGENTS if shutil.which(agent.command)]
    if not agents:
        print(__doc__)  # noqa: T201 - a command's own output
        return 1
    if url is not None:
        model = ask_server(url, os.environ.get("CANOPY_API_KEY"))
        for agent in agents:
            _tell(agent, QUESTION, model)
        return 0
    card = replace(CARD, context_length=200_000)
    with served(build_app(ScriptedBackend(stand_in, model=card))) as url:
        model = ServerModel(url, card.id, card.context_length)
        right = [
            words in _tell(agent, prompt, model)
            for agent in agents
            for prompt, words in ((QUESTION, "Paris, says the swarm."), (ORDER, "It prints 42."))
        ]
    return 0 if all(right) else 1


def _tell(agent: Agent, prompt: str, model: ServerModel) -> str:
    began = time.monotonic()
    answer = agent.ask(prompt, model)
    took_s = time.monotonic() - began
    print(f"== {agent.command}, {took_s:.1f} s: {prompt}\n{answer.strip()[-600:]}")  # noqa: T201 - a command's own output
    return answer


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))
