"""The device that tests compute on: the CPU, unless the environment names a GPU.

CANOPY_TEST_DEVICE=cuda python -m pytest tests/unit tests/model        # in float32 too, with the same assertions
"""

from __future__ import annotations

import os

DEVICE = os.environ.get("CANOPY_TEST_DEVICE", "cpu")
DEVICES = tuple(dict.fromkeys(("cpu", DEVICE)))
