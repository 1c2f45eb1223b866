"""The cheapest chain for a client, and the layers that a swarm needs most. Pure."""
