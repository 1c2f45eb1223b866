"""Lets a node pause while its owner needs the machine, and go on by itself afterwards.

Owns when; the node itself owns how.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from typing import Final, Protocol

import psutil
import torch

from node.life.autostart.pausing import (
    CpuShare,
    GpuShare,
    PauseJudge,
    Wishes,
    causes,
    everybodys_time,
    family,
    time_of,
)
from node.life.autostart.state_file import running_pids
from node.model.config import ServeConfig
from node.model.loading import Say, pick_device
from swarm.base.logs import CountedLog, describe
from swarm.compute.kernels.support import kind_of

LOOK_S: Final = 5.0
RETRY_S: Final = 60.0
"""After the node could not go on."""

logger = logging.getLogger(__name__)


class PausableNode(Protocol):
    """What is used of the node here."""

    async def pause(self, reason: str) -> None:
        """Take no sessions, and let those that run move away."""

    async def resume(self) -> None:
        """Take sessions again.

        Raises:
            SwarmError: the layers cannot be loaded now.
        """


class Pauser:
    """Looks for causes to pause every few seconds.

    Attributes:
        paused_for: why the node pauses; None while it does not.
    """

    def __init__(self, judge: PauseJudge, say: Say, look_s: float = LOOK_S, retry_s: float = RETRY_S) -> None:
        self.paused_for: str | None = None
        self._judge = judge
        self._say = say
        self._look_s = look_s
        self._retry_s = retry_s
        self._troubles = CountedLog(logger)

    async def wait_until_free(self) -> None:
        """Return when there is no cause to pause; nothing is loaded before."""
        while (reason := await self._look()) is not None:
            if reason != self.paused_for:
                self._say(f"waits, and loads nothing yet: {reason}")
            self.paused_for = reason
            await asyncio.sleep(self._look_s)
        self.paused_for = None

    async def keep_looking(self, node: PausableNode) -> None:
        """Pause the node and let it go on, for ever; return at once where there is nothing to look for."""
        while self._judge.is_needed:
            await asyncio.sleep(self._look_s)
            reason = await self._look()
            if reason is None:
                await self._go_on(node)
            elif self.paused_for is None:
                self.paused_for = reason
                self._say(f"pauses: {reason}")
                await node.pause(reason)
            else:
                self.paused_for = reason

    async def _go_on(self, node: PausableNode) -> None:
        if self.paused_for is None:
            return
        try:
            await node.resume()
        except Exception as error:  # noqa: BLE001 - such as a GPU whose memory a game still holds
            self._troubles.say("resume", f"cannot go on yet after a pause: {describe(error)}")
            await asyncio.sleep(self._retry_s)
            return
        self._say(f"goes on after a pause: {self.paused_for} no more")
        self.paused_for = None

    async def _look(self) -> str | None:
        try:
            return await asyncio.to_thread(self._judge.look) if self._judge.is_needed else None
        except Exception as error:  # noqa: BLE001 - whatever a sensor does, the node goes on as it is
            self._troubles.say("look", f"cannot see whether to pause: {describe(error)}")
            return self.paused_for


def judge_of(config: ServeConfig, worked_ms: Callable[[], float]) -> PauseJudge:
    """What a node with these options pauses for."""
    wishes = Wishes(config.pause_when_busy, config.pause_on_battery, config.quiet())
    if not wishes.when_busy:
        return PauseJudge(causes(wishes, lambda: None, ""), time.monotonic)

    def own() -> set[int]:
        return family({os.getpid(), *running_pids()})

    device = pick_device(config.device)
    if kind_of(device) == "cuda":
        uuid = "GPU-" + str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
        busy, reason = GpuShare(uuid, own, worked_ms).look, "another program uses the GPU"
    else:
        cores = psutil.cpu_count() or 1
        share = CpuShare(lambda: everybodys_time(time.monotonic), lambda: time_of(own()), cores)
        busy, reason = share.look, "other programs use the processor"
    return PauseJudge(causes(wishes, busy, reason), time.monotonic)
