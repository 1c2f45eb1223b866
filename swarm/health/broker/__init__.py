"""The embedded MQTT broker: its process and what watches over it."""
