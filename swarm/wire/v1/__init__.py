"""Generated protobuf modules; only `swarm.wire` imports them. Regenerate with `python tools/protos.py`."""
