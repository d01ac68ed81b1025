"""What explains: capture of GC, processes and /metrics, and the measured session."""
