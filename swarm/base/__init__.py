"""The running process: tasks with an owner, CPU threads, the garbage collector, other libraries' logs."""
