"""How a machine behind a router is reached."""
