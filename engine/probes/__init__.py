"""Programs of their own that need engine code: `python -m atom.engine.probes.NAME` prints JSON lines."""
