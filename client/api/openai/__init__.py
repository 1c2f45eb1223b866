"""OpenAI's dialect but for Responses: chat completions, completions, models."""
