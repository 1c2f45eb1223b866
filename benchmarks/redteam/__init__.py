"""A red team: attacks on a live swarm that has honest users, and what these feel of them."""
