"""What all rooms of a client share: options, statistics and the target model."""
