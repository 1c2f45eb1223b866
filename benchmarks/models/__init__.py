"""Which models run? Every family that transformers knows, in spans."""
