"""The chain of hops that a session goes over: opened, watched, repaired."""
