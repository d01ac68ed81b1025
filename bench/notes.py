"""What a reader of a load's table has to know about how its figures came about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from atom.bench.metrics import Figure, Samples
from atom.bench.records import Outcome, RequestRecord

__all__ = ["notes_of"]

CACHED_ABOVE: Final = 0.05
"""Share of prompt tokens that may be found in the cache beyond what the load's own prompts share."""


def notes_of(
    load: Mapping[str, Any], samples: Samples, records: Sequence[RequestRecord], figures: Mapping[str, Figure]
) -> list[str]:
    notes: list[str] = []
    if samples.chunks:
        tokens = figures["tokens_per_chunk"].value or 0.0
        line = f"{tokens:.2f} tokens per chunk; {samples.coalesced / samples.chunks:.1%} of chunks coalesced"
        if samples.counted_chunks:
            line += f", {samples.merged / samples.counted_chunks:.1%} with more than one token"
        notes.append(line)
    done = [record for record in records if record.outcome == Outcome.COMPLETED]
    if guessed := sum(record.tokens_from == "chunks" for record in done):
        notes.append(
            f"output tokens of {_requests(guessed)} are counted from chunks: the server sent no usage for them"
        )
    differ = sum(
        record.prompt_tokens is not None and record.input_len is not None and record.prompt_tokens != record.input_len
        for record in done
    )
    if differ:
        prompts = "1 prompt" if differ == 1 else f"{differ} prompts"
        notes.append(f"{prompts} had another length than planned, by the server's usage; the usage is shown")
    if retried := sum(record.retries for record in records):
        notes.append(f"sent again because the server had closed their idle connection: {_requests(retried)}")
    return [*notes, *_servers(load, records), *_seen_before(load, figures), *_ended_before(load, records, figures)]


def _requests(number: int) -> str:
    return "1 request" if number == 1 else f"{number:,} requests"


def _servers(load: Mapping[str, Any], records: Sequence[RequestRecord]) -> list[str]:
    """Several servers one by one: pooled figures hide that they differ, and what was captured is of the first."""
    urls = [load.get("base_url"), *(load.get("more_urls") or ())]
    if len(urls) < 2:
        return []
    notes: list[str] = []
    for number, url in enumerate(urls):
        mine = [record for record in records if record.server == number]
        done = [r for r in mine if r.outcome == Outcome.COMPLETED and r.first_ns and r.sent_ns and r.last_ns]
        line = f"{url}: {len(done)} of {_requests(len(mine))} completed"
        if done:
            ttft = float(np.median([((r.first_ns or 0) - (r.sent_ns or 0)) / 1e6 for r in done]))
            e2el = float(np.median([((r.last_ns or 0) - (r.sent_ns or 0)) / 1e6 for r in done]))
            line += f", TTFT p50 {ttft:,.1f} ms, E2EL p50 {e2el:,.1f} ms"
        notes.append(line)
    return [*notes, f"figures of the server's side are those of {urls[0]} alone (others: --server-metrics)"]


def _seen_before(load: Mapping[str, Any], figures: Mapping[str, Figure]) -> list[str]:
    """The same prompts against a server that still has them in its cache measure that cache."""
    cached, theory = figures["cached_share"].value, figures.get("theoretical_cached_share")
    shared = _shared(load) if theory is None else theory.value
    if cached is None or shared is None or cached <= shared + CACHED_ABOVE:
        return []
    cause = "--seed" if load.get("nonce") is None else "--cache-bust-nonce"
    return [
        f"{cached:.1%} of prompt tokens were in the server's cache, {shared:.1%} is what these prompts share: the "
        f"server had seen them before (an earlier run with this {cause}?)"
    ]


def _shared(load: Mapping[str, Any]) -> float | None:
    """Of random prompts, the part that they have in common; None of prompts about which nothing is known."""
    source = load.get("source") or {}
    if load.get("api") == "chat":
        return None  # a template begins every prompt with the same words
    length, prefix = source.get("random_input_len"), source.get("random_prefix_len") or 0
    return None if length is None or length + prefix == 0 else prefix / (length + prefix)


def _ended_before(
    load: Mapping[str, Any], records: Sequence[RequestRecord], figures: Mapping[str, Figure]
) -> list[str]:
    """The prompts were at their end long before the duration."""
    duration, planned, took = load.get("duration_s"), load.get("num_prompts"), figures["duration"].value
    rate = load.get("request_rate", "inf")
    own_times = (load.get("source") or {}).get("timestamps_used")
    if duration is None or planned is None or took is None or load.get("ramp") is not None or own_times:
        return []
    enough = rate != "inf" and planned >= 0.95 * rate * duration
    if enough or len(records) < planned or took >= 0.95 * duration:
        return []
    return [f"all {planned:,} prompts were done after {took:.3g} s of --duration {duration:g}: more need --num-prompts"]
