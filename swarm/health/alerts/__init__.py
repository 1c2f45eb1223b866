"""Alert rules, their records, the feed and webhooks."""
