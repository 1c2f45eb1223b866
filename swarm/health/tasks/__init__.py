"""What the health service does all the time: record, probe, publish."""
