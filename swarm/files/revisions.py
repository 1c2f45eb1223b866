"""Which commit of a hub model has the files of a manifest: that of the swarm, when the main branch has gone on.

A swarm's word for a commit is a hint. Only commits of the main branch are looked at, since anybody can add commits to a
hub model by a pull request; and those that lie in the cache, which this machine has fetched before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from huggingface_hub import HfApi, constants
from huggingface_hub.file_download import repo_folder_name

from swarm.base.errors import SwarmError
from swarm.files.hub import ANSWER_TIMEOUT_S, CONFIG, DIGEST
from swarm.files.hub_errors import FETCH_ERRORS, explain
from swarm.protocol.manifest import Manifest

MAX_COMMITS: Final = 32
"""Commits whose files are looked at: those that are hinted at, and the newest others."""


def fitting_commits(repo: str, manifest: Manifest, hints: Sequence[str]) -> Iterator[str]:
    """Commits that have all files of a manifest; small files may differ between them.

    Args:
        hints: commits that are looked at first.

    Yields:
        Commits' hashes: those in the cache first, then as the hub lists them.

    Raises:
        SwarmError: the hub refuses or cannot be reached, and nothing in the cache was taken.
    """
    cached = [commit for commit in dict.fromkeys(hints) if _is_cached(repo, commit)]
    yield from cached
    history = _history(repo)
    hinted = [commit for commit in dict.fromkeys(hints) if commit in set(history)]
    wanted = {file.sha256 for file in manifest.files}
    for commit in list(dict.fromkeys([*hinted, *history]))[:MAX_COMMITS]:
        if commit not in cached and wanted <= _digests(repo, commit):
            yield commit


def _is_cached(repo: str, commit: str) -> bool:
    cache = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")
    return DIGEST.fullmatch(commit) is not None and (cache / "snapshots" / commit / CONFIG).exists()


def _history(repo: str) -> list[str]:
    """The commits of the main branch, the newest first."""
    try:
        return [str(commit.commit_id) for commit in HfApi().list_repo_commits(repo)]
    except FETCH_ERRORS as error:
        raise _explained(error, repo) from error


def _digests(repo: str, commit: str) -> set[str]:
    """The digests of a commit's files, as the hub lists them."""
    try:
        info = HfApi().model_info(repo, revision=commit, timeout=ANSWER_TIMEOUT_S, files_metadata=True)
    except FETCH_ERRORS as error:
        raise _explained(error, repo) from error
    return {file.lfs.sha256 for file in info.siblings or () if file.lfs is not None and file.lfs.sha256}


def _explained(error: Exception, repo: str) -> SwarmError:
    return explain(error, repo, "its commits")
