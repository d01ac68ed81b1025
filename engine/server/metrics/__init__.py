"""What `/metrics` says: cheap accumulators on the hot path, a catalog of families, rendering at scrape time."""
