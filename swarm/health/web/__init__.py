"""The page, the HTTP API, badges and snapshots."""
