"""What to run and how to start it: YAML recipes, their schema, the launcher."""
