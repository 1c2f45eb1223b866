"""The state of a swarm, from records, telemetry and probes. Pure but for the MQTT feed and the directory."""
