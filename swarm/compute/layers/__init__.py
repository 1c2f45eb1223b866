"""A model's layers: which of them run, and how rows enter and leave them."""
