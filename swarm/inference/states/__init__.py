"""States of a session in layers that keep no keys and values: where they lie, and after which token each is."""
