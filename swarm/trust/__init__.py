"""How a machine that computes something else than it says is found: commitments, evidence, bounds, replay."""
