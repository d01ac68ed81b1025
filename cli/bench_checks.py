"""What `atom bench` refuses before a run: values that no server could take, sizes that no load has, flags that would
override or ignore each other. What one load needs to be consistent is checked where it is described (`bench/load.py`,
`bench/random_load.py`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from atom.recipes.errors import UsageError

__all__ = [
    "MAX_PROMPT_TOKENS",
    "check_numbers",
    "check_prompt_tokens",
    "check_texts",
    "most_prompts",
    "parse_extra_body",
]

MAX_REQUESTS: Final = 10_000_000
MAX_TOKENS: Final = 16_000_000
"""Of one prompt, of one output, and of a vocabulary."""
MAX_PROMPT_TOKENS: Final = 4_000_000_000
"""Of a whole load: its requests are made before it and kept on disk, at about 7 bytes a token."""
MAX_SECONDS: Final = 10 * 365 * 86400.0

_RANGES: Final[Mapping[str, tuple[str, float, float, str]]] = {
    "num_prompts": ("--num-prompts", 1, MAX_REQUESTS, "requests"),
    "num_warmups": ("--num-warmups", 0, MAX_REQUESTS, "requests"),
    "max_concurrency": ("--max-concurrency", 1, MAX_REQUESTS, "requests"),
    "random_input_len": ("--random-input-len", 1, MAX_TOKENS, "tokens"),
    "random_output_len": ("--random-output-len", 1, MAX_TOKENS, "tokens"),
    "random_prefix_len": ("--random-prefix-len", 0, MAX_TOKENS, "tokens"),
    "num_prefixes": ("--num-prefixes", 1, MAX_REQUESTS, "prefixes"),
    "sharegpt_output_len": ("--sharegpt-output-len", 1, MAX_TOKENS, "tokens"),
    "custom_output_len": ("--custom-output-len", -1, MAX_TOKENS, "tokens"),
    "block_size": ("--block-size", 1, MAX_TOKENS, "tokens"),
    "vocab_size": ("--vocab-size", 4, MAX_TOKENS, "tokens"),
    "probe_outputs": ("--probe-outputs", 0, 256, "prompts"),
    "seed": ("--seed", 0, 2**63 - 1, ""),
    "warmup_duration": ("--warmup-duration", 1e-3, MAX_SECONDS, "seconds"),
    "concurrency_ramp_duration": ("--concurrency-ramp-duration", 1e-3, MAX_SECONDS, "seconds"),
    "ramp_up_start_rps": ("--ramp-up-start-rps", 1e-6, 1e9, "requests per second"),
    "ramp_up_end_rps": ("--ramp-up-end-rps", 1e-6, 1e9, "requests per second"),
    "workers": ("--workers", 1, 1024, "processes"),
    "grace_period": ("--grace-period", 0, MAX_SECONDS, "seconds"),
    "request_cancellation_rate": ("--request-cancellation-rate", 0, 1, ""),
    "request_cancellation_delay": ("--request-cancellation-delay", 0, MAX_SECONDS, "seconds"),
    "burstiness": ("--burstiness", 1e-3, 1e6, ""),
    "duration": ("--duration", 1e-3, MAX_SECONDS, "seconds"),
    "request_timeout": ("--request-timeout", 1e-3, MAX_SECONDS, "seconds"),
    "ready_timeout": ("--ready-timeout", 1e-3, MAX_SECONDS, "seconds"),
    "temperature": ("--temperature", 0, 1e6, ""),
    "min_p": ("--min-p", 0, 1, ""),
    "top_k": ("--top-k", -1, 2**31 - 1, ""),
    "logprobs": ("--logprobs", 0, 2**31 - 1, ""),
}

_LOAD_FIELDS: Final[Mapping[str, str]] = {
    "model": "--model",
    "prompt": "{prompt}",
    "messages": "{prompt} with --backend openai-chat",
    "max_tokens": "{output}",
    "max_completion_tokens": "{output}",
    "stream_options": "--continuous-usage-stats",
    "ignore_eos": "--ignore-eos",
    "temperature": "--temperature",
    "top_p": "--top-p",
    "top_k": "--top-k",
    "min_p": "--min-p",
    "logprobs": "--logprobs",
    "top_logprobs": "--logprobs",
}
"""Fields of a request that have an option; a load has its own for prompts and lengths."""


def check_numbers(given: Mapping[str, Any]) -> None:
    """`given`: options by parameter name; None is an option that was not given. UsageError names the flag."""
    for name, (flag, low, high, unit) in _RANGES.items():
        value = given.get(name)
        if value is None or low <= value <= high:
            continue
        if value < low and isinstance(value, int):
            wanted = "must not be negative" if low == 0 else f"must be at least {low:g}"
        elif low == 1e-3 and value <= 0:
            wanted = "must be positive"
        else:
            wanted = f"must be from {low:,g} to {_plain(high)}" + (f" {unit}" if unit else "")
        raise UsageError(f"{_declared(given, name, flag)} {wanted}, got {value}")
    top_p = given.get("top_p")
    if top_p is not None and not 0 < top_p <= 1:
        raise UsageError(f"--top-p must be above 0 and at most 1, got {top_p}")


def _declared(given: Mapping[str, Any], name: str, flag: str) -> str:
    """The flags of this command for a parameter, the first and the others: which was typed is not known."""
    context = given.get("ctx")
    parameters = [] if context is None else context.command.params
    declared: list[str] = next((one.opts for one in parameters if one.name == name), [])
    first, *others = declared or [flag]
    return f"{first} ({', '.join(others)})" if others else first


def check_prompt_tokens(given: Mapping[str, Any]) -> None:
    per_prompt = given["random_input_len"] + given["random_prefix_len"]
    total = (given["num_prompts"] + given["num_warmups"]) * per_prompt
    if total > MAX_PROMPT_TOKENS:
        raise UsageError(
            f"--num-prompts × (--random-input-len + --random-prefix-len) is {total:,} prompt tokens, "
            f"{MAX_PROMPT_TOKENS:,} are the most: requests are made before the load and kept on disk, at about "
            "7 bytes a token"
        )


def most_prompts(given: Mapping[str, Any]) -> int:
    """The greatest `num_prompts` that the checks here let pass."""
    per_prompt = given["random_input_len"] + given["random_prefix_len"]
    warmups: int = given["num_warmups"]
    return min(MAX_REQUESTS, MAX_PROMPT_TOKENS // max(int(per_prompt), 1) - warmups)


def check_texts(given: Mapping[str, Any]) -> None:
    """Bytes that are no UTF-8 reach Python as lone surrogates, which no JSON, table or request can carry."""
    for name in ("model", "base_url", "host", "endpoint", "api_key", "header", "label", "metadata", "extra_body"):
        value = given.get(name)
        for text in [value] if isinstance(value, str) else value or []:
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise UsageError(f"--{name.replace('_', '-')} is not UTF-8")


def parse_extra_body(
    text: str | None, *, prompt: str = "--random-input-len", output: str = "--random-output-len"
) -> dict[str, Any]:
    """`--extra-body`: a JSON object without the fields that the load itself sets. `prompt`, `output`: the options
    for prompts and output lengths."""
    flag = "--extra-body"
    try:
        value = {} if text is None else json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag} must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{flag} must be a JSON object such as '{{\"min_tokens\": 20}}', got {text!r}")
    for name in value:
        if name == "stream":
            raise UsageError(f"{flag} must not have {name!r}: every request is streamed, so that tokens can be timed")
        if name in _LOAD_FIELDS:
            use = _LOAD_FIELDS[name].format(prompt=prompt, output=output)
            raise UsageError(f"{flag} must not have {name!r}, which the load sets: use {use}")
    return value


def _plain(value: float) -> str:
    return f"{int(value):,}"
