"""The answer to an Info call: what a node serves, its room, what it has done. Plain values; counts nothing."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.layers import Span


@dataclass(frozen=True, slots=True)
class Counters:
    """What a node has done since it started: numbers that only rise.

    Attributes:
        sweeps: sweeps finished.
        frames_in: frames received.
        frames_out: frames sent.
        forwards: forwards run.
        tree_nodes: tree nodes received.
        rows_in_forwards: rows that went into forwards.
        pruned_nodes: tree nodes that were not run because a queued commit had killed them.
        errors: errors in sessions.
        replays: snapshots sent to a new hop.
        catch_ups: sweeps sent again to a new hop.
        restores: snapshots that this node was restored from.
        restored_nodes: tree nodes of those snapshots.
        replay_us: compute of those snapshots, in microseconds.
        doubles: sweeps that had come from a replica already.
        differences: those of them whose rows were not the replica's.
    """

    sweeps: int = 0
    frames_in: int = 0
    frames_out: int = 0
    forwards: int = 0
    tree_nodes: int = 0
    rows_in_forwards: int = 0
    pruned_nodes: int = 0
    errors: int = 0
    replays: int = 0
    catch_ups: int = 0
    restores: int = 0
    restored_nodes: int = 0
    replay_us: int = 0
    doubles: int = 0
    differences: int = 0


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a node serves and how much room it has.

    Attributes:
        name: the model's hub id, or its folder's name.
        fingerprint: the model's, over the three digests below.
        config_digest: hex digest of config.json.
        weights_digest: hex digest of the weights.
        tokenizer_digest: hex digest of the tokenizer.
        num_layers: layers of the whole model.
        span: layers that this node serves.
        vocab_size: token ids are below it.
        hidden_size: values of a hidden row.
        numeric_class: what decides the last bits (`swarm.protocol.numeric_class`).
        version: of the program.
        kv_tokens_total: KV tokens for all sessions together.
        kv_tokens_free: KV tokens that no session has reserved.
        sessions: sessions open now.
        counters: what it has done so far.
    """

    name: str
    fingerprint: str
    config_digest: str
    weights_digest: str
    tokenizer_digest: str
    num_layers: int
    span: Span
    vocab_size: int
    hidden_size: int
    numeric_class: str
    version: str
    kv_tokens_total: int
    kv_tokens_free: int
    sessions: int
    counters: Counters
