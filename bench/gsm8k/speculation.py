"""What a run directory knows of speculative decoding in its server, for the accuracy beside it.

Accepted drafts of a real verification leave the model's answers as they are. Where acceptance is forced (a setting for
throughput tests), drafts are emitted unchecked: the text is not the model's, and its accuracy means nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from atom.bench.rundir import RunDirectory, read_jsonl

__all__ = ["Speculation", "speculation_of"]

_FORCED: Final = re.compile(
    r"synthetic_acceptance_(?:length|rates?)\b(?!\W{0,4}(?:None|null))|rejection_sample_method\W{1,4}synthetic"
    r"|spec-decode-acceptance-(?:length|rate)"
    r"|(?:simulate_acc_len|spec_decode_force_num_accepted_tokens)=(?!-1|0\b|$)",
    re.IGNORECASE,
)
"""How vLLM, ROCm's ATOM, SGLang and TensorRT-LLM are told to accept drafts unseen."""
_ON: Final = re.compile(
    r"--(?:speculative|spec)[-_](?!decode-acceptance)\w+|--num[-_]speculative[-_]tokens|speculative_config\W{1,3}\w*[({]"
    r"|speculative_algorithm\W{1,4}(?!None|null)\w",
    re.IGNORECASE,
)
_OFF: Final = re.compile(r"speculative_(?:config|algorithm)\W{1,4}(?:None|null)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Speculation:
    state: str
    """`forced`, `real` (drafts were verified, as its counters say), `on` (by its settings alone), `off` or
    `not reported`."""
    text: str
    """A sentence for the table."""


def speculation_of(run_dir: RunDirectory, run: Mapping[str, Any], start_ns: int, end_ns: int) -> Speculation:
    """From the server's command and environment, what it said of itself, and its counters within the window."""
    said = list(_words(run))
    forced = next((match for text in said if (match := _FORCED.search(text))), None)
    drafts, accepted = _counted(run_dir, start_ns, end_ns)
    if forced is not None:
        return Speculation(
            "forced",
            f"speculative decoding: acceptance is FORCED ({forced[0]}); the text is not the model's, and its accuracy "
            "means nothing",
        )
    if drafts:
        length = f", {1 + accepted / drafts:.2f} tokens a step" if accepted is not None else ""
        return Speculation("real", f"speculative decoding: real acceptance{length} ({drafts:,} drafts verified)")
    if any(map(_ON.search, said)):
        return Speculation(
            "on", "speculative decoding: on by the server's settings; no counters say whether drafts are verified"
        )
    if any(map(_OFF.search, said)):
        return Speculation("off", "speculative decoding: off")
    return Speculation("not reported", "speculative decoding: not reported by the server")


def _words(run: Mapping[str, Any]) -> Iterable[str]:
    """Everything in run.json that says how the server was started, or what it said."""
    server, target = run.get("server") or {}, run.get("target") or {}
    command, env = server.get("command"), server.get("env")
    if isinstance(command, list):
        yield " ".join(map(str, command))
    if isinstance(env, dict):
        yield from (f"{name}={value}" for name, value in env.items())
    if isinstance(told := target.get("speculation"), str):
        yield told


def _counted(run_dir: RunDirectory, start_ns: int, end_ns: int) -> tuple[int | None, int | None]:
    """Drafts verified and tokens of them accepted between the window's first and last scrape, over all roles."""
    sums: dict[str, int | None] = {"drafts": None, "accepted_tokens": None}
    for path in sorted(run_dir.server.glob("metrics-*.jsonl")):
        seen: dict[str, list[float]] = {name: [] for name in sums}
        for line in read_jsonl(path):
            sent, values = line.get("sent_ns"), line.get("values")
            if isinstance(sent, int) and isinstance(values, dict) and start_ns - _EDGE_NS <= sent <= end_ns + _EDGE_NS:
                for name, found in seen.items():
                    if isinstance(value := values.get(name), int | float):
                        found.append(value)
        for name, found in seen.items():
            if found:
                sums[name] = (sums[name] or 0) + int(max(0, found[-1] - found[0]))
    return sums["drafts"], sums["accepted_tokens"]


_EDGE_NS: Final = 2_000_000_000
"""Scrapes are a second apart: those just outside the window count its first and last drafts too."""
