"""What the `swarm` command prints: routes, plans, and the files of a private swarm."""
