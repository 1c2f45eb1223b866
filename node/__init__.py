"""One machine's service: loads a span of layers, keeps KV, runs sweeps, forwards, announces itself."""
