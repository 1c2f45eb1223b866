"""The Python library: swarms, sessions, generations and chats, async and sync."""
