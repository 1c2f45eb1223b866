"""The cheapest chain for a client, the layers that a swarm needs most, and measured delays. Owns no records."""
