"""`atom gc-profile`: what a server's API process loses to garbage collection, from a run directory."""
