"""Writes what `swarm/health/state/alert_rules.py` declares: `python -m tools.alerts`.

The table of docs/reference/alerts.md, and the alerts in Prometheus' rules behind the recorded series.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from swarm.health.state.alert_rules import ALERTS, AlertRule

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "reference" / "alerts.md"
RULES: Final = ROOT / "deploy" / "prometheus" / "rules" / "canopy.yml"
_ROW: Final = "| --- | --- | --- | --- | --- |\n"
_GROUP: Final = "  # Made by `python -m tools.alerts`\n  - name: canopy-alerts\n    rules:\n"


def with_table(page: str) -> str:
    """The page with a row for each alert of the health service."""
    before, row, rest = page.partition(_ROW)
    after = rest[rest.index("\n\n") :] if "\n\n" in rest else ""
    return before + row + "\n".join(map(_row, (rule for rule in ALERTS if rule.holds))) + after


def with_rules(rules: str) -> str:
    """Prometheus' rules with each alert that it can know of."""
    before, group, _ = rules.partition(_GROUP)
    return before + group + "".join(_rule(rule) for rule in ALERTS if rule.prometheus is not None)


def _row(rule: AlertRule) -> str:
    name = " / ".join(f"`{part}`" for part in (rule.kind, rule.about) if part)
    severity = rule.severity.value if rule.worse_if is None else f"{rule.severity}; critical {rule.worse_if[0]}"
    after = f"{rule.delays.raise_s:.0f} s" if rule.delays.raise_s else "at once"
    return f"| {name} | {severity} | {rule.holds} | {after} | {rule.delays.clear_s:.0f} s |"


def _rule(rule: AlertRule) -> str:
    known = rule.prometheus
    assert known is not None
    lines = [f"- alert: {known.alert}", f"  expr: {_text(known.expr)}"]
    lines += [f"  for: {known.lasts}"] if known.lasts else []
    lines += [f"  labels: {{severity: {known.severity or rule.severity}}}", "  annotations:"]
    lines += [f"    summary: {_text(known.summary)}", f"    description: {_text(known.description)}"]
    return "".join(f"      {line}\n" for line in lines)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def main() -> None:
    for file, made in ((PAGE, with_table), (RULES, with_rules)):
        file.write_text(made(file.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
