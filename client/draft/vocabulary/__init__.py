"""Which tokens a draft and a target share, and how the draft reads a text of the target's tokens."""
