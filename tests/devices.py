"""The device that tests compute on: the CPU, unless the environment names a GPU.

CANOPY_TEST_DEVICE=cuda python -m pytest tests/unit tests/model        # in float32 too, with the same assertions
"""

from __future__ import annotations

import os
from typing import Any

import torch

DEVICE = os.environ.get("CANOPY_TEST_DEVICE", "cpu")
DEVICES = tuple(dict.fromkeys(("cpu", DEVICE)))


class OnMps(torch.Tensor):
    """A tensor on the CPU that says it is on Apple's GPU, which refuses float64; made by `on_mps`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Compute as torch does, and refuse what that GPU would.

        Raises:
            TypeError: the result would be float64 there.
        """
        if func is torch.Tensor.cpu:
            return args[0].as_subclass(torch.Tensor)
        if getattr(func, "__self__", None) is torch.Tensor.device:
            return torch.device("mps")
        found = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if isinstance(found, cls) and found.as_subclass(torch.Tensor).dtype is torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
        return found


def on_mps(values: torch.Tensor) -> torch.Tensor:
    """The values as they would lie on Apple's GPU: in no float64, and not beside tensors of the CPU's making."""
    return values.as_subclass(OnMps)
