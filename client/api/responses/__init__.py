"""OpenAI's Responses API: requests with their items, stored responses, and typed events."""
