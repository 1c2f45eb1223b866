"""A bootstrap peer and two nodes as processes, used through every front door and by the examples; then machines die."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE

import nbformat
import pytest
from nbclient import NotebookClient

import client.cli
from client.base.options import Options
from client.terminal.commands import Generate
from swarm.demo import DRAFT, TARGET
from tests.e2e.programs import GONE_S, LONG, Program, bootstrap, environment, info, opened, program, run, serve, within
from tests.forked.program import SCRIPT, start

SPANS = ("0-6", "6-12")
PROMPT = "It was a dark night and the old man"
EXAMPLES = Path(__file__).parents[2] / "examples"
OPENING = "It was a dark night, and the old captain"
MYPY = """
[mypy]
strict = true
explicit_package_bases = true
follow_imports = skip
[mypy-client.*,swarm.*]
follow_imports = silent
"""
"""All that the notebook can name is Canopy's; to read torch and transformers too took a minute."""


@dataclass(frozen=True, slots=True)
class Running:
    """The swarm under test."""

    peer: str
    nodes: dict[str, Program]
    addresses: dict[str, str]

    def sessions(self) -> int:
        """Open sessions on all nodes."""
        return sum(info(address).sessions for address in self.addresses.values())

    def are_free(self) -> bool:
        """Whether all nodes hold nothing."""
        asked = [info(address) for address in self.addresses.values()]
        return all(one.sessions == 0 and one.kv_tokens_free == one.kv_tokens_total for one in asked)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("swarm")
    with ExitStack() as stack:
        peer = stack.enter_context(bootstrap(folder))
        nodes = {
            span: stack.enter_context(program(serve(TARGET, span, peer, folder), folder / f"{span}.log"))
            for span in SPANS
        }
        addresses = {span: node.wait_for(r"serving at \S+").split()[-1] for span, node in nodes.items()}
        yield Running(peer, nodes, addresses)


@pytest.fixture(scope="module")
def bare_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target as a client may have it: no weights."""
    folder = tmp_path_factory.mktemp("client") / TARGET.name
    shutil.copytree(TARGET, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def generate(running: Running, model: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run("client.cli", "generate", str(model), "--prompt", PROMPT, "--join", running.peer, *options)


def test_a_node_says_what_it_does_and_how_the_next_machine_joins(running: Running) -> None:
    log = running.nodes["0-6"].log.read_text()
    assert "layers 0…5 of 12 as float32 on cpu" in log
    assert "ms per sweep of 64" in log
    assert "--layers 6-12 --join /ip4/127.0.0.1/tcp/" in log


def test_status_names_who_serves_what(running: Running) -> None:
    shown = run("swarm.cli", "status", "--join", running.peer)
    assert shown.returncode == 0, shown.stderr
    assert "every layer is served" in shown.stdout
    for text in ("0…5 of 12", "6…11 of 12", *running.addresses.values()):
        assert text in shown.stdout


def test_the_command_line_streams_and_trees_give_the_plain_text(running: Running, bare_target: Path) -> None:
    options = ["--max-new-tokens", "24", "--temperature", "0.8", "--seed", "5", "--stats"]
    plain = generate(running, bare_target, *options, "--nodes", "0")
    tree = generate(running, bare_target, *options, "--draft", str(DRAFT), "--nodes", "16")
    assert plain.returncode == tree.returncode == 0, plain.stderr + tree.stderr
    assert plain.stdout == tree.stdout
    assert len(plain.stdout.split()) > 5
    assert "acceptance length 1.00" in plain.stderr
    assert "acceptance length 1.00" not in tree.stderr
    assert "hop 1" in tree.stderr


def test_a_node_takes_nothing_older_than_tls_1_3(running: Running) -> None:
    """And a real client of another TLS library is served."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, _, port = running.addresses[SPANS[0]].rpartition(":")
    with socket.create_connection((host, int(port)), 5) as plain, context.wrap_socket(plain) as secured:
        assert secured.version() == "TLSv1.3"
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection((host, int(port)), 5) as plain, pytest.raises((ssl.SSLError, ConnectionError)):
        context.wrap_socket(plain)


LIBRARY = """
import asyncio, sys
import grpc.aio
from client import AsyncSwarm, Swarm

async def notebook(model, draft, peer, check_picks):
    checks = {"check_picks": float(check_picks)}
    channel = grpc.aio.insecure_channel("127.0.0.1:1")  # gRPC in use, and a loop that runs
    with Swarm.connect(model, peers=[peer], draft=draft, threads=1, **checks) as swarm:
        pieces = list(swarm.stream("It was a dark night", max_new_tokens=16, seed=7, temperature=0.8, top_p=0.95))
        result = pieces[-1].result
        assert "".join(piece.text for piece in pieces) == result.text == swarm.generate(
            "It was a dark night", max_new_tokens=16, seed=7, temperature=0.8, top_p=0.95, nodes=0).text
        for piece in swarm.stream("It was", max_new_tokens=64):
            break  # leaves the stream early
    async with AsyncSwarm.connect(model, peers=[peer], draft=draft, **checks) as swarm:
        again = await swarm.generate("It was a dark night", max_new_tokens=16, seed=7, temperature=0.8, top_p=0.95)
        assert again.tokens == result.tokens and again.finish_reason == "length"
    await channel.close()
    assert sum(sweep.emitted > 0 for sweep in result.stats.sweeps) < 15, "trees brought several tokens at once"
    assert result.stats.seed == 7 and len(result.stats.hops) == 2

asyncio.run(notebook(*sys.argv[1:]))
print("fine")
"""


def test_a_reader_that_goes_ends_the_text_quietly(running: Running, bare_target: Path) -> None:
    arguments = ["client.cli", "generate", str(bare_target), "--prompt", PROMPT, "--join", running.peer, *LONG]
    with start(arguments, stdout=PIPE, stderr=PIPE) as client:
        assert client.stdout is not None
        assert client.stderr is not None
        assert client.stdout.read(20)
        client.stdout.close()
        assert client.stderr.read() == b""
    assert client.returncode == 128 + signal.SIGPIPE
    assert within(GONE_S, lambda: running.sessions() == 0)


@pytest.mark.parametrize("check_picks", [0, 1])
def test_the_library_in_a_running_loop_opens_the_targets_weights_for_its_checks_alone(
    running: Running, tmp_path: Path, check_picks: int
) -> None:
    target, draft = (Path(shutil.copytree(model, tmp_path / model.name)) for model in (TARGET, DRAFT))
    (tmp_path / f"{SCRIPT}.py").write_text(LIBRARY)
    arguments = (SCRIPT, str(target), str(draft), running.peer, str(check_picks))
    with opened(target / "model.safetensors") as of_target, opened(draft / "model.safetensors") as of_draft:
        done = run(*arguments, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "fine\n"
        assert of_draft() > 0
        assert (of_target() > 0) == (check_picks > 0)


INTERRUPTED = """
import signal, sys, threading
from client import Swarm

LONG = {"max_new_tokens": 1500, "nodes": 0, "temperature": 1.0}

model, peer = sys.argv[1:]
with Swarm.connect(model, peers=[peer], threads=1) as swarm:
    press = (threading.main_thread().ident, signal.SIGINT)
    for how in ("stream", "generate"):
        threading.Timer(1.0, signal.pthread_kill, press).start()
        try:
            if how == "stream":
                for piece in swarm.stream("It was", **LONG):
                    pass
            else:
                swarm.generate("It was", **LONG)
        except KeyboardInterrupt:
            print("interrupted")
        sys.stdin.readline()  # the swarm is still connected while the test looks
"""


def test_ctrl_c_in_the_blocking_library_stops_the_generation(
    running: Running, bare_target: Path, tmp_path: Path
) -> None:
    (tmp_path / f"{SCRIPT}.py").write_text(INTERRUPTED)
    arguments = [SCRIPT, str(bare_target), running.peer]
    with start(arguments, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True, cwd=tmp_path) as client:
        try:
            assert client.stdin is not None
            assert client.stdout is not None
            for _ in ("stream", "generate"):
                assert client.stdout.readline() == "interrupted\n"
                assert within(3, lambda: running.sessions() == 0)
                client.stdin.write("go on\n")
                client.stdin.flush()
            _, said = client.communicate(timeout=20)
        finally:
            client.kill()
    assert client.returncode == 0, said
    assert "Traceback" not in said


def test_more_tokens_than_the_context_holds_are_one_line(
    running: Running, bare_target: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = Generate(model=str(bare_target), prompt=PROMPT, join=(running.peer,), options=Options(max_new_tokens=4000))
    assert client.cli.run(asked) == 1  # in this process, since a program takes seconds to start
    (line,) = capfd.readouterr().err.splitlines()
    assert "exceed the model's context of 2048" in line


def test_in_a_chat_ctrl_c_stops_the_answer_and_not_the_program(
    running: Running, bare_target: Path, tmp_path: Path
) -> None:
    arguments = ["client.cli", "chat", str(bare_target), "--join", running.peer, *LONG]
    with program(arguments, tmp_path / "chat.log") as chat:
        chat.type(PROMPT + "\n")
        chat.wait_for(r"\w+ \w+ \w+")
        chat.process.send_signal(signal.SIGINT)
        chat.wait_for(r"\(stopped;")
        assert running.sessions() == len(SPANS), "the session is kept"
        chat.type("Go on.\n")
        chat.wait_for(r"history\)\n\W*\w+")
        chat.process.send_signal(signal.SIGINT)
        chat.wait_for(r"(?s)\(stopped;.*\(stopped;")
        chat.type("/history\n/quit\n")
        assert chat.process.wait(timeout=30) == 0
    said = chat.log.read_text()
    assert re.search(r"(?s)user: .*assistant: .*user: Go on\.\nassistant: \W*\w+", said)
    assert "Traceback" not in said
    assert within(GONE_S, lambda: running.sessions() == 0)


# The examples, as a user runs them


def example(folder: Path, name: str, *arguments: str, typed: str = "") -> str:
    """What it prints, run as a file of its own in a folder."""
    shutil.copy(EXAMPLES / name, folder / f"{SCRIPT}.py")
    done = run(SCRIPT, *arguments, folder=folder, typed=typed)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == {"generate.py", "chat.py", "notebook.ipynb"}


def test_a_text_streams(running: Running, tmp_path: Path) -> None:
    said = example(tmp_path, "generate.py", str(TARGET), running.peer, "--draft", str(DRAFT), "--tokens", "24")
    text, figures = said.split("\n\n")
    assert text.startswith(OPENING)
    assert len(text.split()) > len(OPENING.split()) + 8
    assert float(figures.split()[0]) > 0
    assert float(figures.split()[2]) > 1


def test_a_conversation_has_turns(running: Running, tmp_path: Path) -> None:
    typed = "Where is the captain?\nAnd his ship?\n\n"
    said = example(tmp_path, "chat.py", str(TARGET), running.peer, "--tokens", "8", typed=typed)
    assert said.count("you: ") == 3
    assert all(len(answer.strip()) > 4 for answer in said.split("you: ")[1:3])


def read_notebook() -> nbformat.NotebookNode:
    path = EXAMPLES / "notebook.ipynb"
    notebook: nbformat.NotebookNode = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    return notebook


@pytest.mark.crossing
def test_the_notebook_runs_from_top_to_bottom(
    running: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = {"CANOPY_MODEL": str(TARGET), "CANOPY_JOIN": running.peer, "CANOPY_DRAFT": str(DRAFT)}
    for name, value in {**environment(), **told, "IPYTHONDIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    notebook = read_notebook()
    assert not [cell for cell in notebook.cells if cell.get("outputs")], "outputs are not committed"
    NotebookClient(notebook, timeout=100, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    others = [output for output in outputs if output.get("name") != "stdout"]
    assert [output for output in others if "IProgress not found" not in output.text] == []  # tqdm's, without ipywidgets
    assert "tokens per tree" in "".join(output.text for output in outputs)


@pytest.mark.crossing  # the notebook is run as one
def test_the_notebooks_code_is_typed(tmp_path: Path) -> None:
    notebook = read_notebook()
    code = tmp_path / "notebook.py"
    code.write_text("\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code"))
    rules = tmp_path / "mypy.ini"
    rules.write_text(MYPY)
    mypy = [sys.executable, "-m", "mypy", "--config-file", str(rules), "--cache-dir", os.devnull, str(code)]
    done = subprocess.run(mypy, capture_output=True, text=True, check=False, cwd=EXAMPLES.parent)
    assert done.returncode == 0, done.stdout


# Machines and clients die


def test_a_killed_client_leaves_nothing_and_frees_its_sessions(
    running: Running, bare_target: Path, tmp_path: Path
) -> None:
    arguments = ["client.cli", "generate", str(bare_target), "--prompt", PROMPT, "--join", running.peer, "--wait", "2"]
    with program([*arguments, *LONG], tmp_path / "client.log") as client:
        client.wait_for(r"\w+ \w+ \w+")
        assert running.sessions() == len(SPANS)
        assert not running.are_free()
        _, left = client.end(signal.SIGKILL)
    assert not left
    assert within(GONE_S, running.are_free)


def test_a_killed_node_leaves_nothing_and_ends_the_text_with_a_clear_error(
    running: Running, bare_target: Path, tmp_path: Path
) -> None:
    arguments = ["client.cli", "generate", str(bare_target), "--prompt", PROMPT, "--join", running.peer, "--wait", "2"]
    with program([*arguments, *LONG], tmp_path / "client.log") as client:
        client.wait_for(r"\w+ \w+ \w+")
        _, left = running.nodes["6-12"].end(signal.SIGKILL)
        assert not left
        assert client.process.wait(timeout=30) == 1
    said = client.log.read_text()
    assert re.search(r"(?m)^client: waiting up to 2 s: nobody serves layers 6…11", said)
    last = said.splitlines()[-1]
    assert re.search(r"client: generation interrupted after \d+ tokens: nobody serves layers 6…11", last)
    assert re.search(r"go on with the same command and: --resume \S+/interrupted-[-\d]+\.json$", last)
    assert "Traceback" not in said
    assert within(GONE_S, lambda: info(running.addresses["0-6"]).sessions == 0)


def test_a_signal_ends_a_node_politely_and_the_gap_is_named_at_once(running: Running, bare_target: Path) -> None:
    """Last: ends the node that is left. Status and rest after SIGTERM: swarm/files/test_gguf.py."""
    assert running.nodes["0-6"].end(signal.SIGINT) == (0, [])
    refused = generate(running, bare_target)
    _check_refusal(refused, "nobody serves layers 0…")
    assert "this fills the gap: node serve demo-target --layers 0-" in refused.stderr
    assert refused.stderr.strip().endswith(f"--join {running.peer}")
    shown = run("swarm.cli", "status", "--join", running.peer)
    assert "nobody serves" in shown.stdout


def _check_refusal(done: subprocess.CompletedProcess[str], says: str) -> None:
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert says in lines[0]
