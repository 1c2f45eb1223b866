"""Failures between this machine and the hub as one line each: what happened, to which model, what to do.

No message contains a token, or text that the hub sent.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # exported where mypy does not look

from swarm.base.errors import HubError, NotEnoughSpace, SwarmError, UnknownModel

FETCH_ERRORS = (OSError, httpx.HTTPError, ValueError, TypeError, KeyError)
"""What a request to the hub may raise; the last three where the server that answers is no hub."""

LOG_IN = "set HF_TOKEN or run `hf auth login`"
DISK_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Where what comes from the hub is kept.

    Attributes:
        variable: of the environment, which names another one.
    """

    folder: str | Path
    variable: str


def explain(error: Exception, model: str, what: str = "", kept: StorePlace | None = None) -> SwarmError:
    """The typed error for an exception of a request to the hub.

    Args:
        error: one of `FETCH_ERRORS`.
        what: the file or revision that was requested; empty for the model itself.
        kept: where it was to be kept; None for Hugging Face's cache.
    """
    subject = f"{model}: {what}" if what else model
    match error:
        case HFValidationError():
            return UnknownModel(f"{model}: neither a folder nor a hub id")
        case OfflineModeIsEnabled():
            where = f"not in the cache ({constants.HF_HUB_CACHE})"
            return UnknownModel(f"{subject}: {where}, and HF_HUB_OFFLINE forbids to download; unset it")
        case RevisionNotFoundError():
            return UnknownModel(f"{subject}: the hub has no such branch, tag or commit; check --revision")
        case RemoteEntryNotFoundError():
            return UnknownModel(f"{subject}: the hub has no such file; the model there is incomplete")
        case HfHubHTTPError():
            return _refused(error, model, subject)
        case LocalEntryNotFoundError():  # raised by hf_hub_download in place of what happened
            cause = error.__cause__
            return explain(cause if isinstance(cause, FETCH_ERRORS) else ConnectionError("no answer"), model, what)
        case httpx.HTTPError():
            return _unreachable(error, subject)
        case OSError(errno=int()):
            return _not_stored(error, subject, kept or StorePlace(constants.HF_HUB_CACHE, "HF_HOME"))
    return HubError(f"{subject}: {hub_name()} does not answer as a hub does; is a proxy or login page in between?")


def hub_name() -> str:
    """The hub's host; an address may hold a password, so it is not shown whole."""
    return urlsplit(constants.ENDPOINT).hostname or "the hub"


def check_token() -> None:
    """Refuse a token that cannot be sent, before a library quotes it in an error.

    Raises:
        HubError: the token has characters that no token has, or its file cannot be read.
    """
    try:
        token = get_token()
    except (OSError, ValueError):
        raise HubError(f"the token in {constants.HF_TOKEN_PATH} cannot be read; {LOG_IN}") from None
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        raise HubError(f"the token for {hub_name()} holds characters that no token has; {LOG_IN}")


def _refused(error: HfHubHTTPError, model: str, subject: str) -> SwarmError:
    status, has_token = error.response.status_code, get_token() is not None
    page = f"{constants.ENDPOINT if '@' not in constants.ENDPOINT else hub_name()}/{model}"
    gated = isinstance(error, GatedRepoError)
    match status:
        case 401 | 403 if gated and not has_token:
            return HubError(f"{subject}: gated; accept its licence at {page}, then {LOG_IN}")
        case 403 if gated:
            return HubError(
                f"{subject}: gated, and your token has no access; accept the licence at {page}, and check that the "
                "token may read gated models"
            )
        case 401 if has_token:
            return HubError(f"{subject}: {hub_name()} does not accept your token; make a new one, then {LOG_IN}")
        case 401:
            return HubError(f"{subject}: {hub_name()} has no public model of this name; if it is private, {LOG_IN}")
        case 403:
            return HubError(f"{subject}: {hub_name()} refuses access; check what your token may read")
        case 404:
            hint = "your token cannot read it" if has_token else LOG_IN
            return UnknownModel(
                f"{subject}: no such model on {hub_name()}; check the name, or if it is private: {hint}"
            )
        case 429:
            return HubError(f"{subject}: too many requests to {hub_name()}; wait some minutes, or {LOG_IN}")
        case _ if status >= 500:
            return HubError(f"{subject}: {hub_name()} is in trouble (HTTP {status}); try again later")
    return HubError(f"{subject}: {hub_name()} answers HTTP {status}; update Canopy, or check HF_ENDPOINT")


def _unreachable(error: httpx.HTTPError, subject: str) -> HubError:
    """No network, no such host, no answer in time; the host may be one that the hub redirects to."""
    try:
        host = error.request.url.host or hub_name()
    except RuntimeError:  # failed before there was a request
        host = hub_name()
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return HubError(f"{subject}: {host} cannot be reached ({reason}); check the network, then run this again")


def _not_stored(error: OSError, subject: str, kept: StorePlace) -> SwarmError:
    where, variable = kept.folder, kept.variable
    if error.errno in DISK_FULL:
        return NotEnoughSpace(f"{subject}: the disk of {where} is full; free some, or set {variable} to another disk")
    reason = os.strerror(error.errno or 0)
    return HubError(
        f"{subject}: cannot be kept in {where} ({reason}); set {variable} to a folder that you can write to"
    )
