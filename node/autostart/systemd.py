"""The unit of a node under systemd's user manager. Writes and starts nothing.

deploy/systemd has the units of machines that only serve: a user of its own, the file system shut. A user's unit cannot
shut it: `ProtectSystem=`, `PrivateTmp=` and the like need user namespaces there, which some distributions deny, and the
node would not start at all. What is written here needs no privilege and denies a GPU nothing.
"""

from __future__ import annotations

from typing import Final

from node.autostart.arguments import ServiceProgram

MARK: Final = "# Written by `node install`"
GROWING_RESTARTS: Final = 254
"""The first systemd whose waits between restarts grow."""
STOP_SLACK_S: Final = 30
"""What a node may take to stop beyond its drain."""


def unit_text(name: str, program: ServiceProgram, version: int) -> str:
    """The unit's text.

    Args:
        name: of the unit, without `.service`.
        program: what it runs.
        version: of systemd; older ones know less.
    """
    longer = ", and waits longer each time" if version >= GROWING_RESTARTS else ""
    growing = "RestartSteps=8\nRestartMaxDelaySec=10min\n" if version >= GROWING_RESTARTS else ""
    start, *arguments = program.command  # no variable can stand in the path of the program
    environment = {"PYTHONUNBUFFERED": "1", **program.environment}
    return f"""\
{MARK}, which writes it anew each time, and removed by `node uninstall`.
# Changes of your own: systemctl --user edit {name}
[Unit]
Description=Canopy node
# The network may be away for hours: the node is tried again for ever{longer}.
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart={" ".join([quoted(start), *(quoted(word.replace("$", "$$")) for word in arguments)])}
{"".join(f"Environment={quoted(f'{key}={value}')}{chr(10)}" for key, value in sorted(environment.items()))}\
# SIGTERM to the node alone: it lets its sessions move and ends its own helpers. A second signal ends it at once.
KillMode=mixed
KillSignal=SIGTERM
TimeoutStopSec={program.drain_s + STOP_SLACK_S:.0f}
# 2: an option that does not exist; trying again would not help
RestartPreventExitStatus=2
Restart=on-failure
RestartSec={10 if growing else 60}
{growing}
# It makes way: for processor and disk it comes last, and where memory runs out it goes first.
Nice=10
CPUWeight=20
IOSchedulingClass=idle
IOWeight=20
OOMScoreAdjust=500
TasksMax=1024
LimitNOFILE=16384

# What it cannot do
UMask=0077
NoNewPrivileges=yes
LockPersonality=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native

[Install]
WantedBy=default.target
"""


def quoted(word: str) -> str:
    """A word as systemd reads it back: its escapes and specifiers mean nothing in it."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return '"' + escaped.replace("\n", "\\n").replace("\t", "\\t") + '"'
