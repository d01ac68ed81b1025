"""Compiled kernels: C for the CPU executor in `cpu/`, built by `build.py`, called through `bindings.py`."""
