"""The device that computes, as it is published: product name, memory in use, temperature. Knows no model."""

from __future__ import annotations

import logging

import torch

from swarm.compute.devices import device_name, used_bytes

MAX_NAME = 96

logger = logging.getLogger(__name__)


class Device:
    """A torch device as others see it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_thermometer = device.type == "cuda"

    @property
    def name(self) -> str:
        """`cpu`, or the product's name such as `NVIDIA H100 80GB HBM3`; never a host's."""
        return device_name(self._device)[:MAX_NAME]

    def memory_bytes(self) -> int | None:
        """Device memory in use, by all programs; None for a CPU."""
        return used_bytes(self._device)

    def temperature_c(self) -> float | None:
        """Degrees Celsius; None where it is not known."""
        if not self._has_thermometer:
            return None
        try:
            return float(torch.cuda.temperature(self._device))
        except Exception as error:  # noqa: BLE001 - torch asks a library that may be missing, and says so in many ways
            self._has_thermometer = False
            logger.info("the device's temperature is not known: %s", error)
            return None
