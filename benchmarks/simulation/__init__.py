"""Recorded texts, virtual clocks and chains: the decode loop without machines."""
