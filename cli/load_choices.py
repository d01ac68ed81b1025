"""Options become choices: which server, how to speak to it, which load. For every command that loads a server; the
options themselves are in `cli/load_options.py`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from atom.bench.arrivals import ArrivalPattern, Arrivals, Ramp
from atom.bench.load import DEFAULT_FAILED_REQUEST_THRESHOLD, Api, Endpoint, parse_goodput
from atom.bench.random_load import RandomSource
from atom.bench.static_load import StaticLoad
from atom.bench.target import Target
from atom.cli import options as opt
from atom.cli.bench_checks import parse_extra_body
from atom.cli.load_run import LoadFactory, ServerChoice
from atom.diag.metrics_target import parse_metrics_targets
from atom.recipes.cpus import allow_cpus, check_pinnable, own_cpus
from atom.recipes.errors import UsageError
from atom.recipes.launcher import LaunchOptions
from atom.recipes.resolve import resolve_recipe

__all__ = [
    "BACKENDS",
    "LOAD_DEFAULTS",
    "arrivals",
    "check_address",
    "launch_options",
    "limits",
    "pin_client",
    "random_load",
    "sampling",
    "server_choice",
    "wants_text",
]

BACKENDS: Final = {
    "openai": Api.COMPLETIONS,
    "vllm": Api.COMPLETIONS,
    "sglang-oai": Api.COMPLETIONS,
    "openai-chat": Api.CHAT,
    "vllm-chat": Api.CHAT,
    "sglang-oai-chat": Api.CHAT,
}
LOAD_DEFAULTS: Final[Mapping[str, Any]] = {
    "recipe": None,
    "base_url": None,
    "host": "127.0.0.1",
    "port": 8000,
    "model": None,
    "backend": "openai",
    "endpoint": None,
    "api_key": None,
    "header": None,
    "insecure": False,
    "request_timeout": 6 * 3600.0,
    "server_metrics": None,
    "gpu_telemetry": None,
    "random_input_len": 1024,
    "random_output_len": 128,
    "random_range_ratio": 0.0,
    "random_prefix_len": 0,
    "num_prefixes": 1,
    "prompt_type": None,
    "tokenizer": None,
    "vocab_size": None,
    "num_warmups": 0,
    "max_concurrency": None,
    "request_rate": "inf",
    "arrival_pattern": None,
    "burstiness": 1.0,
    "ramp_up_strategy": None,
    "ramp_up_start_rps": None,
    "ramp_up_end_rps": None,
    "concurrency_ramp_duration": None,
    "warmup_duration": None,
    "duration": None,
    "grace_period": None,
    "request_cancellation_rate": 0.0,
    "request_cancellation_delay": 0.0,
    "workers": 1,
    "seed": 0,
    "ignore_eos": False,
    "temperature": 0.0,
    "top_p": None,
    "top_k": None,
    "min_p": None,
    "logprobs": None,
    "extra_body": None,
    "continuous_usage_stats": False,
    "goodput": None,
    "slice_duration": 1.0,
    "failed_request_threshold": DEFAULT_FAILED_REQUEST_THRESHOLD,
    "save_detailed": False,
}
"""What `atom bench random` does without its options, by parameter: for commands that have fewer."""

PATHS: Final = {Api.COMPLETIONS: "/v1/completions", Api.CHAT: "/v1/chat/completions"}


def server_choice(given: dict[str, Any], launch: LaunchOptions) -> ServerChoice:
    """`given`: options by parameter name; `launch` is for a server that is started."""
    if given["backend"] not in BACKENDS:
        raise UsageError(f"--backend must be one of {', '.join(BACKENDS)}; got {given['backend']!r}")
    api = BACKENDS[given["backend"]]
    host = f"[{given['host']}]" if ":" in given["host"] else given["host"]
    urls = given["base_url"] or [f"http://{host}:{given['port']}"]
    first, *others = [url.rstrip("/").removesuffix("/v1") for url in ([urls] if isinstance(urls, str) else urls)]
    return ServerChoice(
        recipe=given["recipe"],
        base_url=first,
        more_urls=tuple(others),
        model=given["model"],
        backend=given["backend"],
        api=api,
        path=given["endpoint"] or PATHS[api],
        api_key=given["api_key"],
        headers=opt.parse_pairs("--header", given["header"] or [], "=:"),
        verify_tls=not given["insecure"],
        request_timeout=given["request_timeout"],
        launch=launch,
        extra_metrics=tuple(parse_metrics_targets(given["server_metrics"] or [])),
        gpu_telemetry=given["gpu_telemetry"],
    )


def check_address(given: dict[str, Any]) -> None:
    """One way to say which server, and none of it empty."""
    if given["recipe"] is not None and given["base_url"] is not None:
        raise UsageError("--recipe starts a server of its own, --base-url names one that runs: give one of them")
    for flag in ("--host", "--port"):
        source = given["ctx"].get_parameter_source(flag.removeprefix("--"))
        for other, why in (("--base-url", "names host and port itself"), ("--recipe", "chooses where its server is")):
            if given[other.removeprefix("--").replace("-", "_")] is not None and source.name == "COMMANDLINE":
                raise UsageError(f"{other} {why}, {flag} would be ignored: give one of them")
    for name in ("recipe", "base_url", "host", "model", "endpoint"):
        if given[name] == "" or (isinstance(given[name], list) and "" in given[name]):
            raise UsageError(f"--{name.replace('_', '-')} must not be empty")
    if not re.fullmatch(r"[\w.:%-]+", given["host"], re.ASCII):
        raise UsageError(f"--host must be a name or an address, got {given['host']!r}")
    if not 0 < given["port"] < 65536:
        raise UsageError(f"--port must be from 1 to 65535, got {given['port']}")


def launch_options(given: dict[str, Any]) -> LaunchOptions:
    """For a recipe. What only a recipe can use is refused without one."""
    arguments = list(given["ctx"].args)
    for flag, value in (
        ("--set", given["set_"] or None),
        ("--devices", given["devices"]),
        ("--ready-timeout", given["ready_timeout"]),
        ("--server-env", given["server_env"] or None),
        ("--server-env-file", given["server_env_file"]),
        ("--server-cpus", given["server_cpus"]),
        ("server arguments", arguments or None),
    ):
        if value is not None and given["recipe"] is None:
            raise UsageError(f"{flag}: only for a server that --recipe starts; got {value!r}")
    return LaunchOptions(
        model=given["model"],
        devices=given["devices"],
        variables=opt.parse_pairs("--set", given["set_"] or []),
        extra_args=arguments,
        ready_timeout_s=given["ready_timeout"],
        env={**_env_of_file(given["server_env_file"]), **opt.parse_pairs("--server-env", given["server_env"] or [])},
        cpus=_server_cpus(given),
    )


_MOST_ENV_BYTES: Final = 1 << 20


def _env_of_file(name: str | None) -> dict[str, str]:
    """What `--server-env-file` says. What it holds stands in no message."""
    if name is None:
        return {}
    try:
        with open(0 if name == "-" else name, "rb", closefd=name != "-") as file:
            raw = file.read(_MOST_ENV_BYTES + 1)
        env = json.loads(raw) if len(raw) <= _MOST_ENV_BYTES else None
    except OSError as error:
        raise UsageError(f"--server-env-file {name}: cannot read it: {error.strerror}") from None
    except (ValueError, RecursionError):
        env = None
    if not isinstance(env, dict) or not all(isinstance(one, str) for one in env.values()):
        raise UsageError(
            f'--server-env-file {name}: it must hold a JSON object of texts such as {{"NAME": "VALUE"}}, 1 MiB at most'
        )
    return env


def _server_cpus(given: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Where the server is to run; a client that moves (`pin_client`) does not take it along."""
    if given["server_cpus"] is not None:
        check_pinnable("--server-cpus", resolve_recipe(given["recipe"]))
        return opt.given_cpus("--server-cpus", given["server_cpus"])
    return own_cpus() if given["client_cpus"] is not None and given["recipe"] is not None else None


def pin_client(given: Mapping[str, Any]) -> None:
    """Put this process, and those it starts from now on, on the CPUs that `--client-cpus` names."""
    if given["client_cpus"] is not None:
        allow_cpus(opt.given_cpus("--client-cpus", given["client_cpus"]))


def sampling(given: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters of a request's body."""
    fields = {name: given[name] for name in ("temperature", "top_p", "top_k", "min_p") if given[name] is not None}
    if given["logprobs"] is None:
        return fields
    if BACKENDS[given["backend"]] is Api.COMPLETIONS:
        return {**fields, "logprobs": given["logprobs"]}
    return {**fields, "logprobs": True, "top_logprobs": given["logprobs"]}


def limits(given: dict[str, Any]) -> dict[str, Any]:
    """What every load has besides its workload: options of `LoadSpec`."""
    if given["request_cancellation_delay"] and not given["request_cancellation_rate"]:
        raise UsageError("--request-cancellation-delay needs --request-cancellation-rate, of which share")
    return {
        "max_concurrency": given["max_concurrency"],
        "num_warmups": given["num_warmups"],
        "warmup_duration": given["warmup_duration"],
        "seed": given["seed"],
        "duration": given["duration"],
        "grace_period": given["grace_period"],
        "cancellation_rate": given["request_cancellation_rate"],
        "cancellation_delay": given["request_cancellation_delay"],
        "ignore_eos": given["ignore_eos"],
        "keep_text": given["save_detailed"],
        "failed_request_threshold": given["failed_request_threshold"],
        "goodput": parse_goodput(given["goodput"] or []),
        "slice_duration": given["slice_duration"],
    }


def arrivals(given: dict[str, Any]) -> Arrivals:
    """The arrival process; UsageError for options that would be ignored."""
    rate, ramp = opt.parse_rate(given["request_rate"]), _ramp(given)
    if ramp is not None and math.isfinite(rate):
        raise UsageError("--ramp-up-strategy says how the rate goes: leave out --request-rate")
    pattern = given["arrival_pattern"]
    if pattern is not None and pattern not in tuple(ArrivalPattern):
        raise UsageError(f"--arrival-pattern must be one of {', '.join(ArrivalPattern)}; got {pattern!r}")
    if ramp is None and math.isinf(rate):
        for flag, differs in (("--burstiness", given["burstiness"] != 1), ("--arrival-pattern", pattern is not None)):
            if differs:
                raise UsageError(f"{flag} says how requests arrive at a --request-rate, which is not given")
    elif given["concurrency_ramp_duration"] is not None:
        raise UsageError("--concurrency-ramp-duration is for a closed loop: leave out --request-rate or the ramp of it")
    if given["concurrency_ramp_duration"] is not None and given["max_concurrency"] is None:
        raise UsageError("--concurrency-ramp-duration needs --max-concurrency, where it ends")
    if pattern is None:
        pattern = ArrivalPattern.POISSON if given["burstiness"] == 1 else ArrivalPattern.GAMMA
    return Arrivals(request_rate=rate, pattern=ArrivalPattern(pattern), burstiness=given["burstiness"], ramp=ramp)


def _ramp(given: dict[str, Any]) -> Ramp | None:
    strategy, start, end = (given[f"ramp_up_{name}"] for name in ("strategy", "start_rps", "end_rps"))
    if strategy is None and start is None and end is None:
        return None
    if strategy is None or start is None or end is None:
        raise UsageError("--ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps need each other")
    return Ramp(strategy, start, end)


def wants_text(given: dict[str, Any]) -> bool:
    """Whether prompts are text; UsageError for options that would be ignored."""
    kind, chat = given["prompt_type"], BACKENDS.get(given["backend"]) is Api.CHAT
    if kind not in (None, "ids", "text"):
        raise UsageError(f"--prompt-type must be ids or text, got {kind!r}")
    if kind == "ids" and chat:
        raise UsageError(f"--prompt-type ids: --backend {given['backend']} sends messages, which are text")
    text = kind == "text" or chat
    if text and given["vocab_size"] is not None:
        raise UsageError("--vocab-size is for token ids, and these prompts are text: leave it out")
    if given["tokenizer"] is not None and not text:
        raise UsageError("--tokenizer is for text, and these prompts are token ids: add --prompt-type text")
    return text


def random_load(given: dict[str, Any]) -> LoadFactory:
    api = BACKENDS[given["backend"]]
    text = wants_text(given)
    plan = RandomSource(
        num_prompts=given["num_prompts"],
        api=api,
        model=given["model"] or "",
        input_len=given["random_input_len"],
        output_len=given["random_output_len"],
        range_ratio=given["random_range_ratio"],
        prefix_len=given["random_prefix_len"],
        num_prefixes=given["num_prefixes"],
        text=text,
        tokenizer=given["tokenizer"],
        seed=given["seed"],
        vocab_size=given["vocab_size"],
        ignore_eos=given["ignore_eos"],
        continuous_usage_stats=given["continuous_usage_stats"],
        sampling=sampling(given),
        extra_body=parse_extra_body(given["extra_body"]),
    )
    when = arrivals(given)

    def make(endpoint: Endpoint, target: Target | None) -> StaticLoad:
        source = plan
        if target is not None:
            vocab = plan.vocab_size if plan.vocab_size is not None else target.vocab_size
            source = replace(plan, model=endpoint.model, vocab_size=vocab)
            limit = target.max_model_len
            if limit is not None and api is Api.COMPLETIONS and source.max_total_len > limit:
                raise UsageError(
                    f"prompt and output can reach {source.max_total_len} tokens, the server's context is {limit}: "
                    "lower --random-input-len, --random-prefix-len, --random-output-len or --random-range-ratio"
                )
        return StaticLoad(
            source=source,
            arrivals=when,
            concurrency_ramp_s=given["concurrency_ramp_duration"],
            duration_s=given["duration"],
        )

    return LoadFactory(make=make, options=limits(given), workers=given["workers"])
