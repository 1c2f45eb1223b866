"""How connections leave this machine: byte streams, TLS ports of peers, an HTTP proxy, small packets."""
