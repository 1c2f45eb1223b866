"""What the base install lacks: one line says how to get it, before anything else happens."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

import client.cli
import node.cli
import swarm.cli
from client.base.options import Options
from client.terminal.commands import Bench
from node.model.config import ServeConfig
from swarm.base.errors import ConfigError
from swarm.base.extras import MODULES, Extra, require
from swarm.health.options import Health

PROJECT = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", requirement)[0] for requirement in requirements}


def hide(monkeypatch: pytest.MonkeyPatch, extra: Extra) -> None:
    for module in MODULES[extra]:
        monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.parametrize("extra", MODULES)
def test_the_modules_are_those_of_the_extra(extra: Extra) -> None:
    assert set(MODULES[extra]) == names(EXTRAS[extra])


def test_all_is_every_extra_but_the_developers() -> None:
    assert EXTRAS["all"] == [f"canopy-swarm[{','.join(sorted({*EXTRAS} - {'all', 'dev', 'docs'}))}]"]
    assert EXTRAS["dev"][0] == "canopy-swarm[all,docs]"


def test_the_base_install_has_no_module_of_an_extra() -> None:
    assert not names(PROJECT["dependencies"]) & {module for modules in MODULES.values() for module in modules}


@pytest.mark.parametrize("extra", MODULES)
def test_what_is_there_is_not_asked_for(extra: Extra) -> None:
    require(extra, "a command")


def test_only_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amqtt", None)
    with pytest.raises(ConfigError, match=r"^a command needs amqtt: pip install 'canopy-swarm\[health\]'$"):
        require("health", "a command")


@pytest.mark.parametrize("command", [Health(), Health(embedded_broker=True)])
def test_health_says_its_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], command: Health
) -> None:
    hide(monkeypatch, "health")
    assert swarm.cli.run(command) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("swarm: swarm health needs ")
    assert line.endswith(": pip install 'canopy-swarm[health]'")


def test_a_plot_says_its_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    hide(monkeypatch, "plot")
    assert client.cli.run(Bench(plot=Path("plot.png"), options=Options())) == 1
    assert capfd.readouterr().err == "client: --plot needs matplotlib: pip install 'canopy-swarm[plot]'\n"


def test_metrics_say_their_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    hide(monkeypatch, "metrics")
    assert node.cli.serve(ServeConfig("nonsense", metrics_port=0)) == 1
    line = "node: --metrics-port needs starlette, uvicorn: pip install 'canopy-swarm[metrics]'\n"
    assert capfd.readouterr().err == line
