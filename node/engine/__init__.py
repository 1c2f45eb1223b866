"""The engine: sessions' work in batches, one sweep at a time, and what it costs."""
