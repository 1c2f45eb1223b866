"""Canopy's shared library: session rules, token tree, sampling, wire codec, registry. Never imports node or client."""
