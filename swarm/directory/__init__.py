"""Who is in the swarm: signed records, identities, proof of an address, coverage and the registry. Chooses no route."""
