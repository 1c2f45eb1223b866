"""What a node tells of itself: counters, reports by MQTT, metrics."""
