"""The build step of the small server: writes what it reports, as a compiled project would make a library."""

from __future__ import annotations

import sys
from pathlib import Path

target = Path(__file__).with_name("src") / "smallserve" / "_built.py"
target.write_text(f'"""Made by build.py."""\n\nPYTHON = "{sys.version_info[0]}.{sys.version_info[1]}"\n')
print(f"built {target.name}")
