"""From start to end of a node: what it opens, loads, announces, and gives up."""
