"""The OpenAI-compatible HTTP server: one API process."""
