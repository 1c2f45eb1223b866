"""What a client imports before it is known whether it has a draft."""

from __future__ import annotations

import subprocess
import sys

HEAVY = """
import sys
import client.library.aio
assert {"torch", "transformers", "client.draft.loading", "client.draft.heads.eagle"} <= sys.modules.keys()
heavy = {"transformers.modeling_utils", "torch._dynamo", "torch.distributed.tensor", "scipy"}
print(*sorted(heavy & sys.modules.keys()))
"""


def test_a_client_imports_no_models_base() -> None:
    """Transformers' base of all models brings these, and takes as long as everything else together."""
    done = subprocess.run([sys.executable, "-c", HEAVY], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
