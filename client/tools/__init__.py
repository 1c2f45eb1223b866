"""Programs beside the client itself: the demo, the benchmark and the training of heads."""
