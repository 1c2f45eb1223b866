"""The registry over a hivemind DHT, which runs in a process of its own."""
