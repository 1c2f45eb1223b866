"""Models as files: the hub, fingerprints, families and whole models. Never runs code that comes with a model."""
