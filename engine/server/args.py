"""The server's command line: flags in, `EngineConfig` and `ServerConfig` out. Imports no torch, so `--help` is quick.

A flag that exists in `vllm serve` has that name here where it means the same.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn, get_args

from atom.engine import envs
from atom.engine.config import (
    CacheConfig,
    EngineConfig,
    LoadBalance,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SimulatedConfig,
)
from atom.engine.errors import ConfigError
from atom.engine.server.config import ServerConfig

_SUFFIXES: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_EXAMPLES: Final = """\
examples:
  python -m atom.engine.server                               the embedded default model on 127.0.0.1:8000
  python -m atom.engine.server ./Llama-3.2-1B --port 0       a Hugging Face directory, on a free port
  python -m atom.engine.server --executor simulated --sim-base-ms 0 --sim-decode-us-per-seq 0
"""


class _Parser(argparse.ArgumentParser):
    """Errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see --help)\n")


def parse_args(
    argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ
) -> tuple[EngineConfig, ServerConfig]:
    """Both configurations from a command line (default: this process's). Exits with status 2 and one line on a wrong
    flag."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        return engine_config(args), server_config(args, environ)
    except ConfigError as error:
        parser.error(str(error))


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m atom.engine.server",
        description="ATOM's OpenAI-compatible server.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_server(parser.add_argument_group("server"))
    _add_model(parser)
    _add_cache_and_scheduler(parser.add_argument_group("cache and scheduler"))
    _add_parallel(parser.add_argument_group("parallelism"))
    _add_executor(parser.add_argument_group("executor"))
    return parser


def _add_server(group: argparse._ArgumentGroup) -> None:
    default = ServerConfig()
    add = group.add_argument
    add("--host", default=default.host, help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=default.port, help="0 takes a free one (default: %(default)s)")
    add("--port-file", type=Path, metavar="PATH", help="write the bound port there once the server is ready")
    add(
        "--api-key",
        nargs="+",
        action="extend",
        metavar="KEY",
        help=f"keys that open /v1 (or ${envs.API_KEY.name}, which other users of the machine cannot see in ps)",
    )
    add("--served-model-name", nargs="+", metavar="NAME", help="names in the API (default: from the model)")
    add(
        "--metrics-dialect",
        choices=("atom", "vllm", "both"),
        default=default.metrics_dialect,
        help="names in /metrics (default: %(default)s)",
    )
    add(
        "--max-body-bytes",
        type=_integer,
        default=default.max_body_bytes,
        metavar="N",
        help="larger request bodies get 413 (default: 16M)",
    )
    add(
        "--enable-access-log",
        dest="access_log",
        action="store_true",
        help="log every HTTP request (default: they are not)",
    )
    add("--disable-access-log", dest="access_log", action="store_false", help=argparse.SUPPRESS)
    add("--disable-uvicorn-access-log", dest="access_log", action="store_false", help=argparse.SUPPRESS)
    add("--request-log", type=Path, metavar="PATH", help="append one JSON line per finished completion")
    add("--profile-dir", type=Path, metavar="DIR", help="where /start_profile writes (default: profiling is off)")
    add(
        "--shutdown-timeout",
        type=float,
        default=default.shutdown_timeout,
        metavar="S",
        help="seconds open requests get to finish after SIGTERM (default: %(default)g)",
    )
    add(
        "--core-timeout",
        type=float,
        default=default.core_timeout,
        metavar="S",
        help="503 while an EngineCore with requests says nothing for so many seconds; 0: never (default: %(default)g)",
    )
    add(
        "--timeout-keep-alive",
        type=int,
        default=default.timeout_keep_alive,
        metavar="S",
        help="seconds an idle connection is kept (default: %(default)s)",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    default = ModelConfig()
    add = group.add_argument
    help_model = "a Hugging Face directory, a .gguf file, preset:NAME or 'embedded' (default: %(default)s)"
    # Two spellings of one thing: each leaves the other's value alone, and giving both is refused.
    add("model_tag", nargs="?", metavar="MODEL", help=help_model.replace("%(default)s", default.model))
    add("--model", metavar="MODEL", help="the same, as a flag")
    add("--tokenizer", metavar="PATH", help="directory with tokenizer.json, or 'bytes' (default: the model's)")
    add("--chat-template", metavar="PATH", help="a Jinja template that replaces the model's own")
    add("--load-format", choices=("auto", "hf", "gguf", "dummy"), default=default.load_format, help="(default: auto)")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default=default.dtype, help="(default: auto)")
    add("--max-model-len", type=_integer, metavar="N", help="context length served (default: the model's)")
    add("--seed", type=int, default=default.seed, help="of requests without one (default: %(default)s)")


def _add_cache_and_scheduler(group: argparse._ArgumentGroup) -> None:
    cache, scheduler = CacheConfig(), SchedulerConfig()
    add = group.add_argument
    add("--block-size", type=int, default=cache.block_size, help="tokens per KV block (default: %(default)s)")
    add("--num-gpu-blocks-override", type=_integer, metavar="N", help="KV blocks (default: by memory)")
    add(
        "--kv-cache-memory",
        "--kv-cache-memory-bytes",
        type=_integer,
        metavar="BYTES",
        help="memory for the KV cache, e.g. 2G (default: a fraction of what is free)",
    )
    _add_switch(group, "--enable-prefix-caching", cache.enable_prefix_caching, "reuse the KV of common prefixes")
    add(
        "--max-num-seqs",
        type=_integer,
        default=scheduler.max_num_seqs,
        metavar="N",
        help="sequences per step (default: %(default)s)",
    )
    add(
        "--max-num-batched-tokens",
        type=_integer,
        metavar="N",
        help=f"tokens per step (default: {scheduler.max_num_batched_tokens}, or --max-num-seqs if that is more)",
    )
    _add_switch(group, "--enable-chunked-prefill", scheduler.enable_chunked_prefill, "split long prompts over steps")
    _add_switch(group, "--async-scheduling", scheduler.overlap, "schedule the next step while one runs")
    add(
        "--max-waiting",
        type=_integer,
        default=scheduler.max_waiting,
        metavar="N",
        help="requests that may wait; beyond it, 503 (default: %(default)s)",
    )


def _add_parallel(group: argparse._ArgumentGroup) -> None:
    default = ParallelConfig()
    add = group.add_argument
    add(
        "--tensor-parallel-size",
        "-tp",
        type=_integer,
        default=default.tensor_parallel_size,
        metavar="N",
        help="workers of one EngineCore among which every layer is divided (default: %(default)s)",
    )
    add(
        "--pipeline-parallel-size",
        "-pp",
        type=_integer,
        default=default.pipeline_parallel_size,
        metavar="N",
        help="stages of one EngineCore, each with its share of the layers (default: %(default)s)",
    )
    add(
        "--data-parallel-size",
        "-dp",
        type=_integer,
        default=default.data_parallel_size,
        metavar="N",
        help="EngineCores, each with the whole model and a KV cache of its own (default: %(default)s)",
    )
    add(
        "--dp-load-balance",
        choices=get_args(LoadBalance),
        default=default.load_balance,
        help="which EngineCore gets a request (default: %(default)s)",
    )
    add(
        "--dp-dispatch-limit",
        type=_integer,
        metavar="N",
        help="requests one of several EngineCores may have in hand (default: --max-num-seqs and an eighth)",
    )


def _add_executor(group: argparse._ArgumentGroup) -> None:
    default, simulated = EngineConfig(), SimulatedConfig()
    add = group.add_argument
    add(
        "--executor",
        choices=("auto", "cpu", "cuda", "simulated"),
        default=default.executor,
        help="what runs the steps (default: %(default)s)",
    )
    add(
        "--num-threads",
        type=int,
        metavar="N",
        help="compute threads of one EngineCore on CPUs (default: its share of all)",
    )
    for name, help_text in (
        ("base_ms", "simulated: milliseconds per step"),
        ("prefill_us_per_token", "simulated: microseconds per prompt token"),
        ("decode_us_per_seq", "simulated: microseconds per decoding sequence"),
        ("jitter", "simulated: standard deviation of the log of the step time"),
    ):
        flag = f"--sim-{name.replace('_', '-')}"
        default_value = getattr(simulated, name)
        add(flag, type=float, default=default_value, metavar="X", help=f"{help_text} (default: %(default)g)")
    add(
        "--sim-vocab-size",
        type=int,
        metavar="N",
        help="simulated: vocabulary where the model has no config.json (default: the tokenizer's)",
    )


def _add_switch(group: argparse._ArgumentGroup, flag: str, default: bool, help_text: str) -> None:
    group.add_argument(
        flag,
        action=argparse.BooleanOptionalAction,
        default=default,
        help=f"{help_text} (default: {'on' if default else 'off'})",
    )


def _integer(text: str) -> int:
    """`4096`, `4k` = 4000, `4K` = 4096, as vLLM reads them; also m/M and g/G."""
    match = re.fullmatch(r"(\d{1,18})(\.\d{1,9})?([kmgKMG]?)", text)
    if match is None or (match[2] and not match[3]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number such as 4096, 4k (4000) or 4K (4096)")
    value = float(f"{match[1]}{match[2]}") if match[2] else int(match[1])
    return int(value * _SUFFIXES[match[3]])


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Raises `ConfigError` naming the flag."""
    if args.model is not None and args.model_tag is not None and args.model != args.model_tag:
        raise ConfigError(f"the model is given twice: {args.model_tag!r} and --model {args.model!r}")
    names = args.served_model_name or [None]
    tokens = args.max_num_batched_tokens
    if tokens is None:
        tokens = max(SchedulerConfig().max_num_batched_tokens, args.max_num_seqs)
    return EngineConfig(
        model=ModelConfig(
            model=args.model or args.model_tag or ModelConfig().model,
            served_model_name=names[0],
            tokenizer=args.tokenizer,
            load_format=args.load_format,
            dtype=args.dtype,
            max_model_len=args.max_model_len,
            seed=args.seed,
            chat_template=args.chat_template,
        ),
        cache=CacheConfig(
            block_size=args.block_size,
            num_blocks=args.num_gpu_blocks_override,
            memory_bytes=args.kv_cache_memory,
            enable_prefix_caching=args.enable_prefix_caching,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=tokens,
            enable_chunked_prefill=args.enable_chunked_prefill,
            max_waiting=args.max_waiting,
            overlap=args.async_scheduling,
        ),
        parallel=ParallelConfig(
            data_parallel_size=args.data_parallel_size,
            tensor_parallel_size=args.tensor_parallel_size,
            pipeline_parallel_size=args.pipeline_parallel_size,
            load_balance=args.dp_load_balance,
            dispatch_limit=args.dp_dispatch_limit,
        ),
        simulated=SimulatedConfig(
            base_ms=args.sim_base_ms,
            prefill_us_per_token=args.sim_prefill_us_per_token,
            decode_us_per_seq=args.sim_decode_us_per_seq,
            jitter=args.sim_jitter,
            **({} if args.sim_vocab_size is None else {"vocab_size": args.sim_vocab_size}),
        ),
        executor=args.executor,
        num_threads=args.num_threads,
    )


def server_config(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> ServerConfig:
    """Raises `ConfigError` naming the flag."""
    keys = tuple(args.api_key or ())
    key = envs.API_KEY.read(environ)
    if not keys and key is not None:
        keys = (key,)
    for path, flag in ((args.port_file, "--port-file"), (args.request_log, "--request-log")):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{flag} {path}: the directory {path.parent} does not exist")
    return ServerConfig(
        host=args.host,
        port=args.port,
        port_file=args.port_file,
        api_keys=keys,
        served_model_names=tuple(args.served_model_name or ()),
        metrics_dialect=args.metrics_dialect,
        max_body_bytes=args.max_body_bytes,
        access_log=args.access_log,
        request_log=args.request_log,
        profile_dir=args.profile_dir,
        sim_vocab_from_tokenizer=args.sim_vocab_size is None,
        shutdown_timeout=args.shutdown_timeout,
        core_timeout=args.core_timeout,
        timeout_keep_alive=args.timeout_keep_alive,
    )
