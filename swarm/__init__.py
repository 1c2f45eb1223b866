"""The shared library of Canopy: session rules, token tree, sampling, wire codec, registry. Never imports node or client."""
