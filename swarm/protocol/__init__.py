"""The session protocol: messages, the rules of a session, what hops remember. Pure."""
