"""The health service for Prometheus."""
