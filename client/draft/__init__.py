"""Drafters: what grows a tree below a text, from models, heads and look-ups."""
