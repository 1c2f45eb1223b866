"""The health service: watches a swarm and shows it on a page, an API, alerts and metrics."""
