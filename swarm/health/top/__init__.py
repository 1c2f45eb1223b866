"""`swarm top`: the state of a swarm in a terminal."""
