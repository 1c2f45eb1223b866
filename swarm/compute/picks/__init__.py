"""What picks are made of: filters, noise on a device, and the way there and back."""
