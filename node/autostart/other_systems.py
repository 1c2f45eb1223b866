"""A node as a launchd agent of macOS and as a task of Windows: UNTESTED. Writes and starts nothing.

They are written from the two systems' references; nobody has run them, and Canopy itself is made for Linux.
"""

from __future__ import annotations

import plistlib
import subprocess
from typing import Final
from xml.etree import ElementTree

from node.autostart.arguments import ServiceProgram

UNTESTED: Final = "untested: written by `node install` from this system's reference, and never run on it"
_TASK: Final = "http://schemas.microsoft.com/windows/2004/02/mit/task"


def launchd_plist(label: str, program: ServiceProgram, log: str) -> bytes:
    """A launchd agent that starts when its user logs in, and again when it fails.

    Args:
        label: its name.
        program: what it runs.
        log: path of the file for its output.
    """
    agent = {
        "Label": label,
        "ProgramArguments": list(program.command),
        "EnvironmentVariables": {"PYTHONUNBUFFERED": "1", **program.environment},
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 60,
        "ExitTimeOut": int(program.drain_s + 30),
        "ProcessType": "Background",
        "LowPriorityIO": True,
        "Nice": 10,
        "Umask": 0o077,
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }
    head, rest = plistlib.dumps(agent, sort_keys=False).split(b"\n", 1)
    return b"%s\n<!-- %s -->\n%s" % (head, UNTESTED.encode(), rest)


def windows_task(program: ServiceProgram) -> bytes:
    """A task for the Windows Task Scheduler that starts when its user logs in, and again when it fails.

    A task has no environment: the program is started by `cmd` after `set`.
    """
    ElementTree.register_namespace("", _TASK)
    task = ElementTree.Element(f"{{{_TASK}}}Task", version="1.2")
    about = _child(task, "RegistrationInfo")
    _child(about, "Description", f"Canopy node ({UNTESTED})")
    _child(_child(_child(task, "Triggers"), "LogonTrigger"), "Enabled", "true")
    settings = _child(task, "Settings")
    restart = _child(settings, "RestartOnFailure")
    _child(restart, "Interval", "PT1M")
    _child(restart, "Count", "999")
    for name, value in (
        ("MultipleInstancesPolicy", "IgnoreNew"),
        ("DisallowStartIfOnBatteries", "false"),  # the node itself pauses
        ("StopIfGoingOnBatteries", "false"),
        ("ExecutionTimeLimit", "PT0S"),
        ("Priority", "8"),
    ):
        _child(settings, name, value)
    sets = "".join(f'set "{key}={value}" && ' for key, value in sorted(program.environment.items()))
    action = _child(_child(task, "Actions"), "Exec")
    _child(action, "Command", "cmd.exe")
    _child(action, "Arguments", f'/d /s /c "{sets}{subprocess.list2cmdline(program.command)}"')
    ElementTree.indent(task)
    data: bytes = ElementTree.tostring(task, encoding="utf-16", xml_declaration=True)
    return data


def _child(parent: ElementTree.Element, name: str, text: str | None = None) -> ElementTree.Element:
    child = ElementTree.SubElement(parent, f"{{{_TASK}}}{name}")
    child.text = text
    return child
