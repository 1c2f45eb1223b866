"""The process around us: owned tasks, CPU threads, the garbage collector, libraries that log too much."""
