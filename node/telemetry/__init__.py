"""What a node publishes of itself: counters, reports by MQTT, metrics."""
