"""Does the controller choose well? Trees and sweeps in flight on real and simulated networks."""
