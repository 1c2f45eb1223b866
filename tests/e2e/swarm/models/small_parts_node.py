"""`node` with a bound on parts of files that a tiny model reaches too, and a hub that the environment names."""

import os
from pathlib import Path

import pytest

from node.cli import main
from swarm.files import tensor_files
from tests.fake_hub import use_hub

if __name__ == "__main__":
    tensor_files.MIN_SAVED_BYTES = 1000  # type: ignore[misc]
    tensor_files.GAP_BYTES = 64  # type: ignore[misc]
    with pytest.MonkeyPatch.context() as patch:
        use_hub(os.environ["CANOPY_TEST_HUB"], Path(os.environ["CANOPY_TEST_HUB_CACHE"]), patch)
        main()
