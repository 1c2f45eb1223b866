"""What nodes and drafts compute with: KV cache, tree attention, ragged batches, sampling, row codecs."""
