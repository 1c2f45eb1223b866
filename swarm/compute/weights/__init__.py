"""Weights in fewer bits than the compute type: how they lie in memory, and products with them."""
