"""Streams between machines: dialling, links, liveness, the next hop."""
