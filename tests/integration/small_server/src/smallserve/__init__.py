"""A small OpenAI-compatible server: continuous batching over a decode step that takes a fixed time."""
