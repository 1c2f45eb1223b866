"""Canopy's shared library: session rules, token tree, sampling, wire codec, registry. Imports neither node nor client."""
