"""Models as files: the hub, fingerprints, families and whole models."""
