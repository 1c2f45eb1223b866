"""How fast: hops, swarms, cards, offloading, losses."""
