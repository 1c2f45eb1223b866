"""Faults, floods, garbage and soaks."""
