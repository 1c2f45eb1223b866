"""Where draft tokens come from: models, heads, look-ups, what the target picked before."""
