"""Conversations as messages and as tokens: templates, tool calls, reasoning. Owns no network."""
