"""Drafting, the decode loop, acceptance, chains and the front doors. Never holds target layers."""
