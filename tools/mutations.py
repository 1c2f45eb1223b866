"""Twenty mistakes, one in each room, that the tests must catch: python -m tools.mutations [--all] [NAME …].

Each is a line of shipped code, found by its text wherever it stands now, what it becomes, and the tests that then
fail. A change of the tests, or a move of code, has lost nothing where all twenty are still caught. The mistakes are
made in a copy of the working tree in a temporary folder, so that neither the tree nor its tests notice.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHIPPED = ("swarm", "node", "client")
ALL = ("--core", "tests")
"""What `make test` runs."""
PYTEST = ("-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist")


@dataclass(frozen=True, slots=True)
class Mutation:
    """One mistake.

    Attributes:
        room: in whose code it is.
        old: the text, which stands once in all shipped files.
        caught_by: test files or pytest node ids that fail then.
    """

    room: str
    old: str
    new: str
    caught_by: str
    means: str


MUTATIONS = (
    Mutation(
        "protocol",
        "parent = None if old.parent == tip else old.parent",
        "parent = old.parent",
        "tests/unit/swarm/protocol/test_session.py",
        "after a commit, survivors still hang below a node that is committed",
    ),
    Mutation(
        "wire",
        "if not 0 < len(data) <= missing:",
        "if not 0 < len(data):",
        "tests/unit/swarm/protocol/test_frames.py",
        "a part may bring more bytes than were announced",
    ),
    Mutation(
        "transport",
        "if self.receipted < parts <= self.written:",
        "if parts <= self.written:",
        "tests/unit/swarm/link/test_liveness.py",
        "a repeated receipt is progress, so a stopped machine is never silent",
    ),
    Mutation(
        "relay",
        "start = max(self._virtual, flow.finish)",
        "start = self._virtual",
        "tests/unit/swarm/reach/relay/test_fair_share.py",
        "a circuit does not pay for what it has carried",
    ),
    Mutation(
        "discovery",
        "if known.expires_at >= item.expires_at:",
        "if known.expires_at < 0:",
        "tests/unit/swarm/directory/test_record_store.py",
        "an earlier word of a signer takes the place of a later one",
    ),
    Mutation(
        "joining",
        "Ed25519PublicKey.from_public_bytes(invite.inviter).verify(signature, _DOMAIN + said)",
        "Ed25519PublicKey.from_public_bytes(invite.inviter)",
        "tests/unit/swarm/directory/joining/test_invite.py",
        "an invite that was changed after it was signed is believed",
    ),
    Mutation(
        "routing",
        "alone[first.end : second.start, ~own] = False",
        "alone[first.end : second.start, own] = False",
        "tests/unit/swarm/routing/test_route.py",
        "the cheapest chain is not found where one machine should compute several spans",
    ),
    Mutation(
        "models",
        "special = {field: settings[field] for field in TOKENIZER_FIELDS if settings.get(field) is not None}",
        "special: dict[str, str] = {}",
        "tests/model/swarm/files/test_fingerprint.py",
        "models that differ in their special tokens have one fingerprint",
    ),
    Mutation(
        "inference",
        "key1 = key1 + _KEY_STEPS[1] & 0xFFFFFFFF",
        "key1 = key1 + _KEY_STEPS[0] & 0xFFFFFFFF",
        "tests/unit/swarm/compute/test_gumbel.py",
        "the noise of the picks is not that of Philox",
    ),
    Mutation(
        "kernels",
        "word1, word3 = product1.to(tl.uint32), product0.to(tl.uint32)",
        "word1, word3 = product0.to(tl.uint32), product1.to(tl.uint32)",
        "tests/unit/swarm/compute/kernels/test_coupled_picks.py",
        "a card draws other tokens than a CPU",
    ),
    Mutation(
        "session",
        "victim = max(own, key=idle_s)",
        "victim = min(own, key=idle_s)",
        "tests/unit/node/session/test_table.py",
        "the session that is in use gives way, and the idle one stays",
    ),
    Mutation(
        "engine",
        "used.virtual_ms = max(used.virtual_ms, self._least_ms)",
        "used.virtual_ms = max(used.virtual_ms, 0.0)",
        "tests/unit/node/session/test_scheduler.py",
        "who was idle has saved time, and holds up all others",
    ),
    Mutation(
        "lifecycle",
        "await node.pause(reason)",
        "await asyncio.sleep(0)",
        "tests/unit/node/life/test_pauses.py",
        "a node does not pause while its owner needs the machine",
    ),
    Mutation(
        "decode",
        "if child is None:\n                self.pending = token",
        "if child is not None:\n                self.pending = token",
        "tests/unit/client/decode/test_walk.py",
        "the walk leaves the tree where the target agreed with it",
    ),
    Mutation(
        "drafting",
        "probs.append(probs[parent] * probability)",
        "probs.append(probability)",
        "tests/unit/client/draft/search/test_tree.py",
        "the tree grows along nodes whose parents are unlikely",
    ),
    Mutation(
        "chain",
        "if node not in picked and state.is_alive(node):",
        "if node not in picked and not state.is_alive(node):",
        "tests/unit/client/chain/test_reply_check.py",
        "a tail may leave a pick out",
    ),
    Mutation(
        "library",
        "if is_over or any(pieces_read):",
        "if is_over:",
        "tests/net/client/library/test_chat.py",
        "an answer that was left early is not in the history",
    ),
    Mutation(
        "api",
        "async with room:\n            try:\n                answer = self.first",
        "if room:\n            try:\n                answer = self.first",
        "tests/unit/client/api/test_choices.py",
        "one request runs any number of answers at a time",
    ),
    Mutation(
        "health",
        "holders = sum(_min_holders(one_class, model.num_layers) for one_class in _by_class(serving))",
        "holders = _min_holders(serving, model.num_layers)",
        "tests/unit/swarm/health/state/test_verdict.py",
        "machines of different numeric classes count as a chain",
    ),
    Mutation(
        "doctor",
        "cause = next((one for one in below if one.level in {Level.TROUBLE, Level.NOT_ASKED}), None)",
        "cause = next((one for one in below if one.level is Level.NOT_ASKED), None)",
        "tests/unit/swarm/doctor/test_ladder.py",
        "a rung is asked although one that it stands on failed",
    ),
)


def find(text: str, root: Path) -> Path:
    """The one shipped file that holds a text.

    Raises:
        ValueError: none does, several do, or one does several times.
    """
    files = (file for folder in SHIPPED for file in sorted((root / folder).rglob("*.py")))
    found = [file for file in files for _ in range(file.read_text(encoding="utf-8").count(text))]
    if len(found) != 1:
        raise ValueError(f"{text!r} stands {len(found)} times in shipped files, and must once")
    return found[0]


def is_caught(mutation: Mutation, root: Path, selection: Sequence[str]) -> bool:
    """Make a mistake in a copy of the tree, run tests there, and take it back; whether they failed.

    Raises:
        RuntimeError: no test ran.
    """
    file = find(mutation.old, root)
    right = file.read_text(encoding="utf-8")
    file.write_text(right.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
        command = [sys.executable, *PYTEST, *selection]
        run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    finally:
        file.write_text(right, encoding="utf-8")
    if run.returncode not in (0, 1):
        raise RuntimeError(f"{mutation.room}: no test ran\n{run.stdout}{run.stderr}")
    return run.returncode == 1


def copy_tree(root: Path) -> None:
    """Copy what git knows of the working tree, as it is now."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT)
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)


def main() -> None:
    """Say of each mutation whether it is caught; exit with 1 where one is missed."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutations", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("rooms", nargs="*", metavar="NAME", help="rooms whose mutation is tried; all by default")
    parser.add_argument("--all", action="store_true", help="run what `make test` runs, until the first failure")
    given = parser.parse_args()
    chosen = [one for one in MUTATIONS if not given.rooms or one.room in given.rooms]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="canopy-mutations-") as folder:
        copy_tree(Path(folder))
        for one in chosen:
            caught = is_caught(one, Path(folder), ALL if given.all else one.caught_by.split())
            missed += not caught
            print(f"{'caught' if caught else 'MISSED'}  {one.room:10} {one.means}", flush=True)  # noqa: T201
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
