"""The health service: what the swarm serves, said to a page, an API, alerts and metrics."""
