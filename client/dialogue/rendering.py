"""Chat templates of strangers: each rendered in a worker, under a lease (`swarm.base.workers`).

A template is a program that comes with a checkpoint, and is run on what users send.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from swarm.base.errors import ConfigError
from swarm.base.plain_text import plain_line
from swarm.base.workers import Worker, WorkerEnded, WorkLease, new_worker

RENDERING: Final = WorkLease(cpu_s=2.0, wall_s=6.0)
"""Of a conversation; one of 100,000 tokens takes 0.05 s."""
IMPORTING: Final = WorkLease(cpu_s=60.0, wall_s=120.0)
"""Of transformers' part that renders: 0.5 s of an idle machine."""
RENDERING_BYTES: Final = 256 << 20
_HANDLER: Final = "client.dialogue.rendering:handle"
_lock = threading.Lock()
_base: list[Worker] = []
"""The worker that has imported what all others need, once it has."""


class TemplateRenderer:
    """Renders one checkpoint's templates, one conversation at a time. Any thread may call it; it may wait."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._lock = threading.Lock()

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """The text.

        Args:
            values: the arguments of transformers' `render_jinja_template` beside the template: what JSON can hold.

        Raises:
            ConfigError: the template does not take them, or takes too much time or memory.
        """
        with self._lock:
            try:
                if self._worker is None or self._worker.has_ended:
                    self._worker = _fork()
                head, text = self._worker.call(_HANDLER, {"template": template, "values": values}, lease=RENDERING)
            except WorkerEnded as error:
                raise ConfigError(f"this model's chat template {error}") from error
        if "refused" in head:
            raise ConfigError(
                f"this model's chat template does not take this conversation: {plain_line(head['refused'])}"
            )
        return text.decode("utf-8", "surrogatepass")

    def close(self) -> None:
        """Let its worker end; another one begins where it is needed again."""
        if self._worker is not None:
            self._worker.close()


def _fork() -> Worker:
    """A worker that has imported what renders; begun anew where somebody ended the one before."""
    with _lock:
        if _base and not _base[0].has_ended:
            with suppress(WorkerEnded):
                return _base[0].fork(RENDERING_BYTES)
        for ended in _base:
            ended.close()
        _base[:] = [new_worker(1 << 30)]
        _base[0].call(_HANDLER, {"template": "", "values": {"conversations": [[]]}}, lease=IMPORTING)
        return _base[0].fork(RENDERING_BYTES)


def handle(head: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    try:
        return {}, rendered(head["template"], head["values"]).encode("utf-8", "surrogatepass")
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 (whatever a stranger's program raises)
        return {"refused": str(error).strip().partition("\n")[0][:500] or type(error).__name__}, b""


def rendered(template: str, values: Mapping[str, Any]) -> str:
    """The text, in this process: for templates of our own."""
    from transformers.utils.chat_template_utils import render_jinja_template

    made: Any = render_jinja_template(chat_template=template, **values)
    return str(made[0][0])
