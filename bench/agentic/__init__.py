"""Agentic multi-turn replay: recorded session trees, sub-agents and all, sent again with their histories and pauses.

`model.py` says what a session is, `weka.py` reads recorded ones, `generate.py` makes up realistic ones, `prompts.py`
turns their block hashes into prompts, `sessions.py` replays one tree, `driver.py` keeps `--concurrency` of them alive,
and `load.py` is the load that a command describes.
"""
