"""The health service and telemetry under load."""
