"""How others come to this machine: by its own port, one that its router maps, or a relay. Proven, then announced."""
