"""A node among others: joining, rebalancing, duplicates, latencies."""
