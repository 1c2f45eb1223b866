"""Generated protobuf modules; only `swarm.protocol.wire` imports them. Regenerate with `python tools/protos.py`."""
