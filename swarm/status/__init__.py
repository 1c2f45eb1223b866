"""What nodes publish over MQTT: formats, signatures, and which messages are accepted. Owns no connection."""
