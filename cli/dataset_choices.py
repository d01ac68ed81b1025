"""Options of loads that are read from files become sources: `atom bench sharegpt`, `custom`, `trace`. What they share
with other loads is `cli/load_choices.py`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from atom.bench.arrivals import Arrivals
from atom.bench.datasets.bodies import RequestFields
from atom.bench.datasets.custom import CustomChoice, CustomSource, custom_source
from atom.bench.datasets.samples import Samples
from atom.bench.datasets.sharegpt import ShareGptChoice, ShareGptSource, sharegpt_source
from atom.bench.datasets.text import word_list
from atom.bench.datasets.trace import TraceReplay, TraceSource, theoretical_hits
from atom.bench.datasets.trace_formats import TraceWindow, read_trace
from atom.bench.load import Endpoint, RequestSource
from atom.bench.static_load import StaticLoad
from atom.bench.target import Target
from atom.cli.bench_checks import MAX_PROMPT_TOKENS, parse_extra_body
from atom.cli.load_choices import BACKENDS, arrivals, limits, sampling, wants_text
from atom.cli.load_run import LoadFactory
from atom.cli.option_groups import arrival_options
from atom.recipes.errors import UsageError

__all__ = ["custom_load", "sharegpt_load", "trace_load"]

Given = dict[str, Any]
Source = TypeVar("Source", bound=RequestSource)
_OVER_LENGTH: Final = ("drop", "clip")


def sharegpt_load(given: Given) -> LoadFactory:
    choice = ShareGptChoice(
        num_prompts=given["num_prompts"],
        seed=given["seed"],
        output_len=given["sharegpt_output_len"],
        tokenizer=given["tokenizer"],
        min_len=given["sharegpt_min_len"],
        max_prompt_len=given["sharegpt_max_prompt_len"],
        max_total_len=given["sharegpt_max_total_len"],
        shuffle=not given["disable_shuffle"],
        oversample=not given["no_oversample"],
    )
    fields = _fields(given, prompt="--dataset-path", output="--sharegpt-output-len")

    def read() -> ShareGptSource:
        return sharegpt_source(given["dataset_path"], choice, fields)

    def complete(source: ShareGptSource, endpoint: Endpoint, target: Target | None) -> ShareGptSource:
        _check_context(target, _total_len(source.samples), "--sharegpt-max-total-len leaves conversations out")
        return replace(source, fields=replace(source.fields, model=endpoint.model))

    return _factory(given, read, complete, arrivals(given))


def custom_load(given: Given) -> LoadFactory:
    output_len = None if given["custom_output_len"] == -1 else given["custom_output_len"]
    choice = CustomChoice(
        num_prompts=given["num_prompts"],
        seed=given["seed"],
        output_len=output_len,
        tokenizer=given["tokenizer"],
        shuffle=not given["disable_shuffle"],
        oversample=not given["no_oversample"],
        use_timestamps=given["use_trace_timestamps"],
        time_scale=given["time_scale"],
    )
    fields = _fields(given, prompt="--dataset-path", output="--custom-output-len")
    when = arrivals(given)

    def read() -> CustomSource:
        source = custom_source(given["dataset_path"], choice, fields)
        if source.offsets is not None:
            _check_schedule(given, "the file has timestamps")
        elif given["time_scale"] != 1:
            raise UsageError("--time-scale is for recorded times, and none are used")
        return source

    def complete(source: CustomSource, endpoint: Endpoint, target: Target | None) -> CustomSource:
        _check_context(target, _total_len(source.samples), "shorten them, or give --custom-output-len")
        return replace(source, fields=replace(source.fields, model=endpoint.model))

    return _factory(given, read, complete, when)


def trace_load(given: Given) -> LoadFactory:
    window = TraceWindow(
        start=given["trace_start"],
        end=given["trace_end"],
        max_input_len=given["max_input_len"],
        max_output_len=given["max_output_len"],
        clip=_over_length(given) == "clip",
        num_prompts=given["num_prompts"],
    )
    replay = TraceReplay(
        seed=given["seed"],
        text=wants_text(given),
        tokenizer=given["tokenizer"],
        vocab_size=given["vocab_size"],
        lengths_only=given["trace_lengths_only"],
        use_timestamps=given["use_trace_timestamps"],
        time_scale=given["time_scale"],
    )
    if replay.use_timestamps:
        _check_schedule(given, "a trace is sent at its own times")
    elif replay.time_scale != 1:
        raise UsageError("--time-scale is for recorded times, which --no-use-trace-timestamps leaves out")
    fields = _fields(given, prompt="--dataset-path", output="--max-output-len")

    def read() -> TraceSource:
        if replay.tokenizer is not None:
            word_list(replay.tokenizer)  # complains before a server is started
        path: Path = given["dataset_path"]
        trace = read_trace(path, window, format=given["trace_format"], block_size=given["block_size"])
        _check_total(int(trace.input_len.sum()), "--num-prompts, --trace-end or --max-input-len")
        cached = None if replay.lengths_only else theoretical_hits(trace)
        return TraceSource(trace=trace, replay=replay, fields=fields, cached=cached)

    def complete(source: TraceSource, endpoint: Endpoint, target: Target | None) -> TraceSource:
        how = "--max-input-len and --max-output-len leave requests out, or shorten them with --over-length clip"
        _check_context(target, source.trace.input_len + source.trace.output_len, how)
        vocab = replay.vocab_size
        if vocab is None and target is not None:
            vocab = target.vocab_size
        named = replace(source.fields, model=endpoint.model)
        return replace(source, fields=named, replay=replace(replay, vocab_size=vocab))

    return _factory(given, read, complete, arrivals(given))


def _factory(
    given: Given,
    read: Callable[[], Source],
    complete: Callable[[Source, Endpoint, Target | None], Source],
    when: Arrivals,
) -> LoadFactory:
    once = lru_cache(maxsize=1)(read)  # before a server is started, and not again when it is there

    def make(endpoint: Endpoint, target: Target | None) -> StaticLoad:
        source = complete(once(), endpoint, target)
        return StaticLoad(
            source=source,
            arrivals=when,
            concurrency_ramp_s=given["concurrency_ramp_duration"],
            duration_s=given["duration"],
        )

    return LoadFactory(make=make, options=limits(given), workers=given["workers"])


def _fields(given: Given, *, prompt: str, output: str) -> RequestFields:
    return RequestFields(
        api=BACKENDS[given["backend"]],
        model=given["model"] or "",
        ignore_eos=given["ignore_eos"],
        continuous_usage_stats=given["continuous_usage_stats"],
        sampling=sampling(given),
        extra_body=parse_extra_body(given["extra_body"], prompt=prompt, output=output),
    )


def _total_len(samples: Samples) -> npt.NDArray[np.int64]:
    """[requests] prompt and output tokens, without prompts that only the server can count."""
    return np.maximum(samples.input_len, 0) + samples.output_len


def _check_context(target: Target | None, total_len: npt.NDArray[np.int64], how: str) -> None:
    limit = None if target is None else target.max_model_len
    if limit is not None and (beyond := int((total_len > limit).sum())):
        raise UsageError(
            f"{beyond:,} of {len(total_len):,} requests have more tokens (prompt and output, up to "
            f"{int(total_len.max()):,}) than the server's context of {limit:,}: {how}"
        )


def _check_total(tokens: int, flags: str) -> None:
    if tokens > MAX_PROMPT_TOKENS:
        raise UsageError(
            f"the load has {tokens:,} prompt tokens, {MAX_PROMPT_TOKENS:,} are the most (requests are made before the "
            f"load and kept on disk): take less with {flags}"
        )


def _check_schedule(given: Given, why: str) -> None:
    """Refuse arrival options that recorded times would override."""
    for name in inspect.signature(arrival_options).parameters:
        if given["ctx"].get_parameter_source(name).name == "COMMANDLINE":
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag}: {why}; give --no-use-trace-timestamps to send it as {flag} says")


def _over_length(given: Given) -> str:
    value = given["over_length"]
    if value is not None and value not in _OVER_LENGTH:
        raise UsageError(f"--over-length must be drop or clip, got {value!r}")
    if value is not None and given["max_input_len"] is None and given["max_output_len"] is None:
        raise UsageError(
            "--over-length says what happens beyond --max-input-len and --max-output-len: give one of them"
        )
    return value or "drop"
