"""What nodes tell the health service by MQTT, and what of it is believed."""
