"""`python -m tools.follow docs/guides/user.md`: executes a guide's commands and compares their output with the guide.

Every machine of the guides is a fresh network namespace with an empty home folder; needs root and iproute2. All
programs that it starts are ended. It replaces what cannot exist on this machine, and nothing else:

    in a guide                       on this machine
    -------------------------------  ---------------------------------------------------------------
    /p2p/Qm… at the end of an        the peer id that was printed with this address: a machine draws
    address                          its key when it first starts
    node, client, swarm, python      the modules of this checkout, with the Python that runs this tool
    cores                            one thread per program (OMP_NUM_THREADS), for all share this machine
    cd canopy                        this checkout is the folder that every machine is in
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from client.tools.demo.programs import end_with_parent
from tools.guide import Block, Guide, GuideError, Step, is_shown, read
from tools.network_lab import NETWORK, NetworkLab, network_lab, why_unavailable

ROOT = Path(__file__).resolve().parent.parent
HOSTS = {"boot": 1, "boot2": 2, "watch": 5, "you": 7, "anna": 11, "ben": 12, "cleo": 13}
ADDRESSES = {host: f"{NETWORK}.{number}" for host, number in HOSTS.items()}
"""The machines of the guides."""
MODULES = {"node": "node.cli", "client": "client.cli", "swarm": "swarm.cli"}
STEP_S, END_S, POLL_S = 150.0, 12.0, 0.05
_ELIDED = re.compile(r"(/ip4/[\d.]+/tcp/\d+)/p2p/Qm\w*…\w*")
_ADDRESS = re.compile(r"(/ip4/[\d.]+/tcp/\d+)/p2p/(\w+)")
_INVITE = re.compile(r"canopy://\w+")
_ELIDED_INVITE = "canopy://…"
_ASSIGNMENT = re.compile(r"(?:export )?([A-Z_]+)=(\S+)\s*(?:#.*)?")

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RunningCommand:
    """A command that was started.

    Attributes:
        log: the file that its output goes to.
    """

    process: subprocess.Popen[bytes]
    log: Path

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


@dataclass(slots=True)
class Follower:
    """Executes guides one after another in the same network lab.

    Attributes:
        lab: the machines of the guides.
        folder: home folders, logs and programs.
        report: receives what was done, line by line.
        skipped_flags: blocks with one of these flags are left out.
        background: commands that keep running, by machine, the newest last.
    """

    lab: NetworkLab
    folder: Path
    report: Report
    skipped_flags: frozenset[str] = frozenset()
    background: dict[str, list[RunningCommand]] = field(default_factory=dict)
    _variables: dict[str, dict[str, str]] = field(default_factory=dict)
    _peers: dict[str, str] = field(default_factory=dict)  # peer ids by address
    _invite: str = ""  # the newest that an output has shown
    _count: int = 0

    def follow(self, guide: Guide) -> None:
        """Execute all blocks of a guide.

        Raises:
            GuideError: a command does not do what the guide shows.
        """
        for block in guide.blocks:
            if block.flags & self.skipped_flags:
                continue
            home = self._home(block.host)
            if block.file is not None:
                (home / block.file).write_text("\n".join(block.text) + "\n", encoding="utf-8")
                continue
            for step in block.steps():
                self._follow(block, step)

    def end(self) -> None:
        """End all commands that still run, the newest first."""
        for running in reversed([command for commands in self.background.values() for command in commands]):
            _end(running, signal.SIGTERM)
        self.background.clear()

    def _follow(self, block: Block, step: Step) -> None:
        where = f"{block.guide}:{step.line}"
        started = time.monotonic()
        if step.command is None:
            if not self.background.get(block.host):
                raise GuideError(f"{where}: nothing runs on {block.host} that could be interrupted")
            running = self.background[block.host].pop()
            _end(running, signal.SIGINT)
        elif (assigned := _ASSIGNMENT.fullmatch(self._complete(step.command, where))) is not None:
            self._variables.setdefault(block.host, {})[assigned[1]] = assigned[2]
            return
        else:
            running = self._start(block.host, self._complete(step.command, where), step.typed)
            if "stays" in block.flags:
                self.background.setdefault(block.host, []).append(running)
                self._wait_shown(running, step, where)
            else:
                self._wait_ended(running, where, fails="fails" in block.flags)
        self._check(running, block, step, where)
        self.report(f"{where}: {block.host}: {step.command or '^C'}  ({time.monotonic() - started:.1f} s)")
        self.report(_indented(running.output()))

    def _complete(self, command: str, where: str) -> str:
        """Fill in the peer ids and the invite that the guide abbreviates."""
        if _ELIDED_INVITE in command:
            if not self._invite:
                raise GuideError(f"{where}: no output has shown an invite")
            command = command.replace(_ELIDED_INVITE, self._invite)

        def address(found: re.Match[str]) -> str:
            if found[1] not in self._peers:
                raise GuideError(f"{where}: no output has named the peer at {found[1]}")
            return f"{found[1]}/p2p/{self._peers[found[1]]}"

        return _ELIDED.sub(address, command)

    def _start(self, host: str, command: str, typed: Sequence[str]) -> RunningCommand:
        self._count += 1
        log = self.folder / f"{self._count:03}-{host}.log"
        typing = self.folder / f"{self._count:03}-{host}.typed"
        typing.write_text("".join(f"{line}\n" for line in typed), encoding="utf-8")
        with log.open("wb") as output, typing.open("rb") as keyboard:
            process = subprocess.Popen(
                [*self.lab.inside(host), "bash", "-c", command],
                stdin=keyboard,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment(host),
                cwd=ROOT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        return RunningCommand(process, log)

    def _environment(self, host: str) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "CANOPY_", "HF_"))}
        here = {
            "HOME": str(self._home(host)),
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "120",
        }
        marks = {name: value for name, value in os.environ.items() if name == "CANOPY_TEST_RUN"}
        return {**own, **marks, **here, **self._variables.get(host, {})}

    def _home(self, host: str) -> Path:
        home = self.folder / host
        home.mkdir(exist_ok=True)
        return home

    def _wait_shown(self, running: RunningCommand, step: Step, where: str) -> None:
        deadline = time.monotonic() + STEP_S
        while time.monotonic() < deadline and running.process.poll() is None:
            if all(is_shown(line, running.output()) for line in step.shown):
                return
            time.sleep(POLL_S)  # a log file has no event to wait for
        if running.process.poll() is not None:
            raise GuideError(f"{where}: ended, and should go on running; its output:\n{_indented(running.output())}")

    def _wait_ended(self, running: RunningCommand, where: str, *, fails: bool) -> None:
        try:
            status = running.process.wait(STEP_S)
        except subprocess.TimeoutExpired:
            _end(running, signal.SIGKILL)
            raise GuideError(f"{where}: had not ended after {STEP_S:.0f} s") from None
        if fails != (status != 0):
            raise GuideError(f"{where}: ended with status {status}; its output:\n{_indented(running.output())}")

    def _check(self, running: RunningCommand, block: Block, step: Step, where: str) -> None:
        output = running.output()
        if "stays" in block.flags:  # other output may repeat an address that a guide gets wrong on purpose
            self._peers.update(_ADDRESS.findall(output))
        self._invite = next(reversed(_INVITE.findall(output)), self._invite)
        missing = [line for line in step.shown if not is_shown(line, output)]
        if missing:
            raise GuideError(f"{where}: does not show {missing[0]!r}, but:\n{_indented(output)}")


@contextmanager
def follower(
    report: Report, skipped_flags: Iterable[str] = (), addresses: Mapping[str, str] = ADDRESSES
) -> Iterator[Follower]:
    """A follower in a fresh network lab; afterwards nothing of either is left."""
    with network_lab(addresses) as lab, tempfile.TemporaryDirectory(prefix="canopy-follow-") as folder:
        for name, module in MODULES.items():
            _program(Path(folder) / name, f"{shlex.quote(sys.executable)} -m {module}")
        _program(Path(folder) / "python", shlex.quote(sys.executable))
        following = Follower(lab, Path(folder), report, frozenset(skipped_flags))
        try:
            yield following
        finally:
            following.end()


def in_order(paths: Iterable[Path]) -> list[Guide]:
    """The guides and those that must be executed first, each once."""
    found: dict[Path, Guide] = {}

    def add(path: Path) -> None:
        if path in found:
            return
        guide = read(path)
        for earlier in guide.after:
            add(earlier)
        found[path] = guide

    for path in paths:
        add(path)
    return list(found.values())


def _program(path: Path, command: str) -> None:
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
    path.chmod(0o755)


def _end(running: RunningCommand, number: int) -> None:
    if running.process.poll() is None:
        running.process.send_signal(number)
    try:
        running.process.wait(END_S)
    except subprocess.TimeoutExpired:
        running.process.kill()
        running.process.wait()
        raise GuideError(f"had to be killed:\n{_indented(running.output())}") from None


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.rstrip().splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.follow", description="Execute the commands of guides on clean machines."
    )
    parser.add_argument("guides", nargs="+", type=Path, help="Markdown files, such as docs/guides/user.md")
    parser.add_argument("--quick", action="store_true", help="leave out blocks that are marked slow, as the tests do")
    given = parser.parse_args()
    if (reason := why_unavailable()) is not None:
        sys.stderr.write(f"follow: {reason}\n")
        return 1
    try:
        with follower(lambda line: print(line, flush=True), {"slow"} if given.quick else ()) as following:  # noqa: T201
            for guide in in_order(given.guides):
                following.follow(guide)
    except GuideError as error:
        sys.stderr.write(f"follow: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
