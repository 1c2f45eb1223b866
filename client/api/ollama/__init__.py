"""Ollama's API: chat, generate, and what describes the model."""
