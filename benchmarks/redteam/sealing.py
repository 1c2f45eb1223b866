"""What strangers sign: identities by the hundred, models that nobody has, and records that break their own bounds."""

from __future__ import annotations

import secrets
from dataclasses import replace
from itertools import combinations
from typing import Any

from cryptography.hazmat.primitives.asymmetric import rsa

from swarm.base.ids import ModelIdentity
from swarm.directory.identity import Identity
from swarm.directory.model_pointer import POINTERS, Filing, ModelPointer, seal_announcement
from swarm.directory.node_record import RECORDS, NodeRecord
from swarm.directory.registry import models_key, record_keys
from swarm.directory.sealing import RecordError

HONEST_RSA_BITS = 2_048


def quick_identities(count: int) -> list[Identity]:
    """So many identities, from few primes: whoever needs many does not search for a prime twice."""
    primes: list[int] = []
    while len(primes) * (len(primes) - 1) // 2 < count:
        numbers = rsa.generate_private_key(public_exponent=65_537, key_size=HONEST_RSA_BITS).private_numbers()
        primes += [numbers.p, numbers.q]
    pairs = list(combinations(primes, 2))[:count]
    return [Identity(_key(max(one, other), min(one, other))) for one, other in pairs]


def _key(one: int, other: int) -> rsa.RSAPrivateKey:
    modulus, exponent = one * other, 65_537
    private = pow(exponent, -1, (one - 1) * (other - 1))
    public = rsa.RSAPublicNumbers(exponent, modulus)
    parts = (private % (one - 1), private % (other - 1), pow(other, -1, one))
    numbers = rsa.RSAPrivateNumbers(one, other, private, *parts, public)
    return numbers.private_key(unsafe_skip_rsa_key_validation=True)


def other_model(model: ModelIdentity, **changes: Any) -> ModelIdentity:  # noqa: ANN401 (fields of `ModelIdentity`)
    """A consistent model that differs in these fields, and in its weights unless some digest is given."""
    if not any(name.endswith("_digest") for name in changes):
        changes["weights_digest"] = secrets.token_hex(32)
    new = replace(model, **changes)
    parts = (new.config_digest, new.weights_digest, new.tokenizer_digest)
    return ModelIdentity.of(new.name, *parts, new.num_layers)


def filings_of(record: NodeRecord, who: Identity) -> tuple[list[Filing], bool]:
    """What lists a machine, and whether this program signs it; what it does not is signed by hand."""
    try:
        return seal_announcement(record, who), True
    except RecordError:
        sealed = RECORDS.sign(RECORDS.body(record), who)
        pointer = ModelPointer(record.peer, record.model, record.expires_at, left=record.left)
        filings = [Filing(key, record.peer, sealed) for key in record_keys(record)]
        place = models_key(record.model.fingerprint)
        return [*filings, Filing(place, pointer.subkey, POINTERS.sign(POINTERS.body(pointer), who))], False
