"""What a forward through fixed addresses is made of: inputs, addresses of sessions, graphs, compiled layers, proof."""
