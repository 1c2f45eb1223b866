"""The background work of the health service: judge and record, probe, publish."""
