"""Runs a node as a service of the user's session: starts with the machine, and stands back when the owner needs it."""
