"""Better ways to a machine that is reached through a relay: in the same network, called back, or by a punched hole."""
