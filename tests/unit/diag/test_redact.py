"""Secrets stay out of run directories, and nothing else does."""

from __future__ import annotations

from atom.diag.redact import REDACTED, redact_arguments, redact_environment


def test_environment() -> None:
    env = {"HF_TOKEN": "a", "OPENAI_API_KEY": "b", "MY_SECRET": "c", "TOKENIZERS_PARALLELISM": "d", "PATH": "e"}
    shown = redact_environment(env)
    assert shown == {**env, "HF_TOKEN": REDACTED, "OPENAI_API_KEY": REDACTED, "MY_SECRET": REDACTED}


def test_arguments() -> None:
    command = [
        "serve",
        "--api-key",
        "k",
        "--max-num-batched-tokens",
        "64",
        "--api-key=k",
        "-e",
        "HF_TOKEN=k",
        "--port",
        "1",
    ]
    assert redact_arguments(command) == [
        "serve",
        "--api-key",
        REDACTED,
        "--max-num-batched-tokens",
        "64",
        f"--api-key={REDACTED}",
        "-e",
        f"HF_TOKEN={REDACTED}",
        "--port",
        "1",
    ]


def test_several_keys_after_one_flag() -> None:
    assert redact_arguments(["--api-key", "a", "b", "--port", "1"]) == ["--api-key", REDACTED, REDACTED, "--port", "1"]
