"""How a machine comes into a swarm: invites, swarms it joined before, and machines of its own network."""
