"""Starts AIPerf with further arguments that stand in no command line, where anybody's `ps` would show them: an API key,
headers, a URL with a password. AIPerf 0.13 takes those from its command line alone.

Run by AIPerf's own interpreter, by path: standard library alone. Arguments: AIPerf's script and what may be seen; the
rest comes in the environment (`bench/agentic/aiperf_client.py` writes it).
"""

import json
import os
import runpy
import sys
from pathlib import Path

VARIABLE = "ATOM_AIPERF_HIDDEN"
"""A JSON list of arguments. Taken out of the environment: AIPerf's own processes inherit it no more."""


def main() -> None:
    script, *seen = sys.argv[1:]
    sys.argv = [script, *seen, *json.loads(os.environ.pop(VARIABLE))]
    sys.path[0] = str(Path(script).resolve().parent)  # as if the script had been started
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
