"""The home router: which one it is, and how it is asked to let others in by a port of its own."""
