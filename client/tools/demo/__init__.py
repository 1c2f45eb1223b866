"""`client demo`: a whole swarm on one machine, over links with delay, and a comparison."""
