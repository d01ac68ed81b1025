"""What serves: scheduler, KV cache, models, executors, HTTP server."""
