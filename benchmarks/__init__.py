"""Benchmarks: each a program that prints and records a table. `python -m benchmarks` lists them."""
