"""Emulated networks and swarms that benchmarks run on."""
