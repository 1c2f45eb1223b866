"""Network namespaces without names (Linux, root): they live as long as a process holds them open, and no longer.

So there is nothing to clean up and no name to collide: when the process that made them dies, however it dies, the
kernel takes its TUN devices, and the namespaces once the last program inside has ended.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
TUN = "/dev/net/tun"
PROGRAMS = {"ip": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
QUEUE_PACKETS = 10_000
"""What the kernel keeps for a TUN's reader: above any window, so that queues form in the emulated links alone."""

_libc = ctypes.CDLL(None, use_errno=True)


def obstacle() -> str | None:
    """Why this process cannot make namespaces joined by TUN devices; None if it can."""
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            return f"the program {program} is missing (Debian package {package})"
    if not os.access(TUN, os.R_OK | os.W_OK):
        return f"{TUN} cannot be opened: needs root and the tun module"
    tried = subprocess.run(("unshare", "--net", "true"), capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"no network namespaces: {tried.stderr.strip()}"


def make_namespace() -> int:
    """The descriptor of a new namespace with its loopback device and nothing else.

    Raises:
        OSError: not allowed.
    """
    with _back_home():
        _check(_libc.unshare(CLONE_NEWNET))
        namespace = os.open(_own(), os.O_RDONLY)
        subprocess.run(("ip", "link", "set", "lo", "up"), check=True, capture_output=True)
    return namespace


def make_host(addresses: Sequence[str], mtu: int) -> tuple[int, int]:
    """A new namespace with a TUN device of its own; the descriptors of the namespace and the device.

    Args:
        addresses: of the device, each with its prefix, such as `10.88.0.1/24`.
        mtu: in bytes.

    Raises:
        OSError: not allowed.
        subprocess.CalledProcessError: an address was refused.
    """
    with _back_home():
        _check(_libc.unshare(CLONE_NEWNET))
        namespace = os.open(_own(), os.O_RDONLY)
        device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH14x", b"tun0", IFF_TUN | IFF_NO_PI))
        commands = (
            "link set lo up",
            *(f"address add {address} dev tun0{' nodad' if ':' in address else ''}" for address in addresses),
            f"link set tun0 mtu {mtu} txqueuelen {QUEUE_PACKETS} up",
        )
        subprocess.run(("ip", "-batch", "-"), input="\n".join(commands), text=True, check=True, capture_output=True)
    return namespace, device


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Sockets made by this thread in the block belong to the namespace at that path; never await in it.

    Raises:
        OSError: the namespace is gone.
    """
    with _back_home():
        descriptor = os.open(namespace, os.O_RDONLY)
        try:
            _check(_libc.setns(descriptor, CLONE_NEWNET))
        finally:
            os.close(descriptor)
        yield


@contextmanager
def _back_home() -> Iterator[None]:
    home = os.open(_own(), os.O_RDONLY)
    try:
        yield
    finally:
        _check(_libc.setns(home, CLONE_NEWNET))
        os.close(home)


def _own() -> str:
    return f"/proc/self/task/{threading.get_native_id()}/ns/net"


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
