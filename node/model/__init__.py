"""A span of a model: checkpoint, loading, proof of its family, offloading."""
