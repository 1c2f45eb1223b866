"""Computation that nodes and drafts share: KV cache, tree attention, ragged batches, sampling, codecs. No network."""
