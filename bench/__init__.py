"""What loads: clients, datasets, metric definitions, request records."""
