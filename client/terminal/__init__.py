"""What `client generate` and `client chat` print and ask."""
