"""Secrets stay out of run directories, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest

from atom.bench.redact import (
    REDACTED,
    is_secret,
    redact,
    redact_arguments,
    redact_environment,
    redact_option,
    redact_text,
)
from atom.bench.rundir import RunDirectory


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


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "hf-token",
        "--api-key",
        "apiKey",
        "OPENAI_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "authToken",
        "DB_PASSWORD",
        "X-Auth",
        "Authorization",
        "GITHUB_TOKEN_RO",
        "MY_KEY_2",
        "HFTOKEN",
        "HF_TOKENS",
        "DB_PASS",
        "private_key_pem",
        "cookie",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "--tokenizer",
        "--max-num-batched-tokens",
        "--long-prefill-token-threshold",
        "eos_token_id",
        "eos_token",
        "per-token",
        "monkey",
        "--key-length",
        "author",
        "--skip-tokenizer-init",
        "TOKENIZERS_PARALLELISM",
        "--input-len",
        "--speculative-token-map",
        "--token-to-kv-pool-size",
        "image_token",
        "sort_key",
        "max_tokens",
        "prompt_tokens",
        "forward_pass",
    ],
)
def test_names_of_nothing_secret(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["--base-url", "http://u:s3cret@h:1"], ["--base-url", "http://h:1"]),
        (["--base-url=https://s3cret@h/x"], ["--base-url=https://h/x"]),
        (["--server-metrics", "p=http://u:s3@cret@h/m"], ["--server-metrics", "p=http://h/m"]),
        (["--server-metrics", "http://h/m?token=s3cret&a=b"], ["--server-metrics", f"http://h/m?token={REDACTED}&a=b"]),
        (["--set", "HF_TOKEN=s3cret"], ["--set", f"HF_TOKEN={REDACTED}"]),
        (["--set=HF_TOKEN=s3cret"], [f"--set=HF_TOKEN={REDACTED}"]),
        (["--set", "model=m"], ["--set", "model=m"]),
        (["--api-key", "-s3cret", "--port", "1"], ["--api-key", REDACTED, "--port", "1"]),
        (
            ["--header", "X: s3cret", "-H", "s3cret", "-Hs3cret"],
            ["--header", REDACTED, "-H", REDACTED, f"-H{REDACTED}"],
        ),
        (["--header=X=s3cret"], [f"--header={REDACTED}"]),
        (
            ["--extra-body", '{"auth_token": "s3cret", "n": 1}'],
            ["--extra-body", f'{{"auth_token": "{REDACTED}", "n": 1}}'],
        ),
        (['--extra-body={"a": {"key": "s3cret"}}'], [f'--extra-body={{"a": {{"key": "{REDACTED}"}}}}']),
        (["--extra-body", '{"n":1}'], ["--extra-body", '{"n":1}']),
        (["--hf-token", "-s3cret", "-v"], ["--hf-token", REDACTED, "-v"]),
        (["--hf-token", "--port", "1"], ["--hf-token", "--port", "1"]),
        (
            ["bash", "-c", "export A=1; vllm serve --api-key s3cret"],
            ["bash", "-c", f"export A=1; vllm serve --api-key {REDACTED}"],
        ),
        (
            ["bash", "-c", "export HF_TOKEN='s3 cret'; serve --trust --hf-token=s3cret --port 1"],
            ["bash", "-c", f"export HF_TOKEN={REDACTED}; serve --trust --hf-token={REDACTED} --port 1"],
        ),
        (
            ["sh", "-c", "bash -c \"x --set 'a b' --api-key s3cret\" && curl -H 'X: s3cret' http://h/?a=b"],
            ["sh", "-c", f"bash -c \"x --set 'a b' --api-key {REDACTED}\" && curl -H {REDACTED} http://h/?a=b"],
        ),
        (["sh", "-c", "x --max-num-batched-tokens 64 A=1"], ["sh", "-c", "x --max-num-batched-tokens 64 A=1"]),
    ],
)
def test_command_lines(command: list[str], shown: list[str]) -> None:
    assert redact_arguments(command) == shown


def test_text_of_many_assignments() -> None:
    assert redact_text("a=" * 3000) == "a=" * 3000
    assert redact_text("a=" * 3000 + "HF_TOKEN=s3cret") == "a=" * 3000 + f"HF_TOKEN={REDACTED}"


def test_options_of_a_sweep() -> None:
    assert redact_option("--base-url", ["http://u:s3cret@h"]) == ["http://h"]
    assert redact_option("--set", ["HF_TOKEN=s3cret", "a=b"]) == [f"HF_TOKEN={REDACTED}", "a=b"]
    assert redact_option("--hf-token", "s3cret") == REDACTED
    assert redact_option("--seed", 1) == 1


def test_nothing_secret_reaches_run_json(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    facts = {"base_url": "http://u:s3cret@h:1", "load": {"extra_body": {"api_key": "s3cret", "n": 1}}, "x": [("a", 1)]}
    run_dir.write_run_json(facts)
    run_dir.seal("failed", ["no server answers at http://u:s3cret@h:1"])
    assert "s3cret" not in run_dir.run_json.read_text()
    assert run_dir.read_run_json()["load"] == {"extra_body": {"api_key": REDACTED, "n": 1}}
    assert redact(redact(facts)) == redact(facts)
