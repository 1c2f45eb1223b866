"""Mutants of everything that strangers send, for every parser that reads it."""
