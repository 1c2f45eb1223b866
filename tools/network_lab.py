"""A network lab on one machine: hosts are network namespaces on one bridge (Linux, root). It has no name server.

Each namespace lives as long as a process that reads our pipe, so nothing is left when this process ends in any way.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

NETWORK = "203.0.113"
"""TEST-NET-3 (RFC 5737): addresses for documentation, which no machine has."""
PROGRAMS = {"ip": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}


def why_unavailable() -> str | None:
    """Why this machine cannot run a network lab; None if it can."""
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            return f"the program {program} is missing (Debian package {package})"
    tried = subprocess.run(("unshare", "--net", "true"), capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"no network namespaces: {tried.stderr.strip()}"


@dataclass(slots=True)
class NetworkLab:
    """Hosts on a common bridge.

    Attributes:
        addresses: the IPv4 address of each host, by name.
    """

    addresses: Mapping[str, str]
    _stack: ExitStack = field(default_factory=ExitStack)
    _keepers: dict[str, int] = field(default_factory=dict)

    def inside(self, host: str) -> list[str]:
        """The start of a command line that runs on a host.

        Raises:
            KeyError: there is no host of that name.
        """
        return ["nsenter", "--target", str(self._keepers[host]), "--net"]

    def build(self) -> None:
        bridge = self._keep("the bridge")
        _ip(bridge, "link add bridge type bridge", "link set bridge up")
        for number, (host, address) in enumerate(self.addresses.items()):
            keeper = self._keep(host)
            _ip(bridge, f"link add port{number} type veth peer name eth0 netns {keeper}")
            _ip(bridge, f"link set port{number} master bridge up")
            _ip(keeper, "link set lo up", f"address add {address}/24 dev eth0", "link set eth0 up")

    def _keep(self, host: str) -> int:
        keeper = subprocess.Popen(("unshare", "--net", "sh", "-c", "echo; exec cat"), stdin=-1, stdout=-1)
        self._stack.callback(keeper.wait)
        self._stack.enter_context(_closing_pipes(keeper))
        assert keeper.stdout is not None
        keeper.stdout.readline()  # its namespace exists now
        self._keepers[host] = keeper.pid
        return keeper.pid


@contextmanager
def network_lab(addresses: Mapping[str, str]) -> Iterator[NetworkLab]:
    """A lab that exists during the block.

    Raises:
        subprocess.CalledProcessError: a command failed, for example without the rights of root.
    """
    lab = NetworkLab(addresses)
    with lab._stack:
        lab.build()
        yield lab


@contextmanager
def _closing_pipes(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _ip(keeper: int, *commands: str) -> None:
    run = ("nsenter", "--target", str(keeper), "--net", "ip", "-batch", "-")
    subprocess.run(run, input="\n".join(commands), text=True, check=True, capture_output=True)
