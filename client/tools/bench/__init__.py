"""`client bench`: paired measurements of decoding methods over a swarm."""
