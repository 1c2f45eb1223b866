"""Routes and placement against the best possible."""
