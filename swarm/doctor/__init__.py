"""Looks at this machine and its network for what keeps it from serving, and says what mends it."""
