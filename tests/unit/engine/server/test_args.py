"""The server's command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from atom.engine.config import EngineConfig
from atom.engine.server.args import parse_args
from atom.engine.server.config import ServerConfig


def test_without_flags_the_defaults_are_the_dataclasses() -> None:
    engine, server = parse_args([], environ={})
    assert engine == EngineConfig()
    assert server == ServerConfig()


def test_flags_reach_their_fields(tmp_path: Path) -> None:
    engine, server = parse_args(
        [
            *("some/dir", "--port", "0", "--port-file", str(tmp_path / "port"), "--api-key", "a", "b"),
            *("--api-key", "c", "--served-model-name", "one", "two", "--metrics-dialect", "vllm"),
            *("--max-body-bytes", "2K", "--shutdown-timeout", "1.5", "--enable-access-log"),
            *("--max-model-len", "4k", "--block-size", "32", "--num-gpu-blocks-override", "100"),
            *("--no-enable-prefix-caching", "--no-enable-chunked-prefill", "--no-async-scheduling"),
            *("--max-num-seqs", "8", "--max-num-batched-tokens", "1K", "--kv-cache-memory-bytes", "1.5G"),
            *("--executor", "simulated", "--sim-base-ms", "0.5", "--sim-vocab-size", "300", "--seed", "7"),
        ],
        environ={},
    )
    assert engine.model.model == "some/dir"
    assert engine.model.served_model_name == "one"
    assert engine.model.max_model_len == 4000
    assert engine.model.seed == 7
    assert (engine.cache.block_size, engine.cache.num_blocks) == (32, 100)
    assert engine.cache.memory_bytes == 3 << 29
    assert not engine.cache.enable_prefix_caching
    assert not engine.scheduler.enable_chunked_prefill
    assert not engine.scheduler.overlap
    assert (engine.scheduler.max_num_seqs, engine.scheduler.max_num_batched_tokens) == (8, 1024)
    assert engine.simulated.base_ms == 0.5
    assert engine.simulated.vocab_size == 300
    assert not server.sim_vocab_from_tokenizer
    assert server.api_keys == ("a", "b", "c")
    assert server.served_model_names == ("one", "two")
    assert server.metrics_dialect == "vllm"
    assert server.max_body_bytes == 2048
    assert server.shutdown_timeout == 1.5
    assert server.access_log
    assert server.port_file == tmp_path / "port"


def test_more_sequences_raise_the_token_budget_that_was_not_given() -> None:
    engine, _ = parse_args(["--max-num-seqs", "5000"], environ={})
    assert engine.scheduler.max_num_batched_tokens == 5000


def test_the_api_key_may_come_from_the_environment() -> None:
    assert parse_args([], environ={"ATOM_API_KEY": "k"})[1].api_keys == ("k",)
    assert parse_args(["--api-key", "x"], environ={"ATOM_API_KEY": "k"})[1].api_keys == ("x",)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--port", "70000"], "--port"),
        (["--port", "x"], "--port"),
        (["--max-body-bytes", "10"], "--max-body-bytes"),
        (["--max-model-len", "4.5"], "--max-model-len"),
        (["--max-model-len", "0"], "--max-model-len"),
        (["--block-size", "12"], "--block-size"),
        (["--max-num-seqs", "9", "--max-num-batched-tokens", "8"], "--max-num-batched-tokens"),
        (["--sim-base-ms", "nan"], "--sim-base-ms"),
        (["--api-key", ""], "--api-key"),
        (["--shutdown-timeout", "inf"], "--shutdown-timeout"),
        (["--core-timeout", "nan"], "--core-timeout"),
        (["--port-file", "/nonexistent/dir/port"], "--port-file"),
        (["a", "--model", "b"], "--model"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--max-num-s", "3"], "--max-num-s"),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_it(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse_args(argv, environ={})
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


def test_help_needs_no_engine() -> None:
    code = (
        "import sys; from atom.engine.server.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'uvicorn', 'tokenizers', 'zmq', 'numpy', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
