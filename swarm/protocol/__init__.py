"""The session protocol: messages, the rules of a session, what hops remember. Pure: owns no bytes and no network."""
