"""Greedy outputs of a server, and whether two arms differ in them more than one arm differs from itself.

`--probe-outputs N` asks N fixed prompts one by one at temperature 0 when the load is over, and keeps the answers in
`outputs.jsonl` of the run. Engines are not batch-invariant and kernels not always deterministic, so a difference
between arms says something only beside what the same arm does on fresh servers: its other runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from atom.bench.load import Api, Endpoint
from atom.bench.metrics import FloatArray
from atom.bench.rundir import JsonlWriter, RunDirectory, read_jsonl
from atom.bench.slices import IntArray

__all__ = ["OUTPUTS_FILE", "Divergence", "Output", "divergence", "probe_outputs", "read_outputs"]

OUTPUTS_FILE: Final = "outputs.jsonl"
MAX_TOKENS: Final = 48
MOST_PROMPTS: Final = 256
_TIMEOUT_S: Final = 120.0
_MOST_ERRORS: Final = 3
"""In a row: then the server is not asked further."""
_SIGNIFICANT: Final = 0.05
_MOST_SPLITS: Final = 2000

_SUBJECTS: Final = (
    "The history of the lighthouse begins with",
    "To make bread at home, first",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics say that",
    "Once upon a time, in a village by the sea,",
    "Question: what is 17 times 23? Answer:",
    "A list of rivers in Europe: Danube, Rhine,",
    "Dear Sir or Madam, I am writing to",
    "SELECT name, count(*) FROM users WHERE",
    "The capital of Australia is",
    "In the morning the orchestra rehearsed, and in the afternoon",
    "Photosynthesis is the process by which",
    "Translate into French: the weather is fine today.",
    "When the network is congested, the protocol",
    "She opened the letter and read:",
    "The difference between a queue and a stack is",
)
_PLACES: Final = ("", "In short: ", "As my teacher used to say, ", "Chapter one. ")


@dataclass(frozen=True, slots=True)
class Output:
    """One answer."""

    text: str
    tokens: tuple[str, ...] | None
    """Texts of its tokens; None where the server does not say."""


def prompt(index: int) -> str:
    """The `index`-th fixed prompt; all are different."""
    subject, place = _SUBJECTS[index % len(_SUBJECTS)], index // len(_SUBJECTS)
    start = _PLACES[place] if place < len(_PLACES) else f"Number {place}. "
    return start + subject


def probe_outputs(endpoint: Endpoint, run_dir: RunDirectory, count: int) -> None:
    """Ask `count` prompts and append the answers to outputs.jsonl. What goes wrong is a line with an `error`."""
    import httpx

    headers = dict(endpoint.headers)
    if endpoint.api_key is not None:
        headers.setdefault("Authorization", f"Bearer {endpoint.api_key}")
    limit = httpx.Timeout(min(_TIMEOUT_S, endpoint.request_timeout), connect=endpoint.connect_timeout)
    failed, with_tokens = 0, True
    with (
        JsonlWriter(run_dir.path / OUTPUTS_FILE) as file,
        httpx.Client(
            base_url=endpoint.base_url, headers=headers, verify=endpoint.verify_tls, timeout=limit, trust_env=False
        ) as client,
    ):
        for index in range(count):
            try:
                response = client.post(endpoint.path, json=_body(endpoint, prompt(index), with_tokens))
                if response.status_code == 400 and with_tokens:  # a server without log-probabilities
                    with_tokens = False
                    response = client.post(endpoint.path, json=_body(endpoint, prompt(index), with_tokens))
                response.raise_for_status()
                answer: dict[str, Any] = {**_answer(response.json(), endpoint.api), "error": None}
                failed = 0
            except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
                answer = {"text": None, "tokens": None, "error": f"{type(error).__name__}: {error}"[:500]}
                failed += 1
            file.append({"index": index, "prompt": prompt(index), **answer})
            if failed >= _MOST_ERRORS:
                return


def _body(endpoint: Endpoint, text: str, with_tokens: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": endpoint.model, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": False}
    if endpoint.api is Api.CHAT:
        body["messages"] = [{"role": "user", "content": text}]
        return {**body, "logprobs": True} if with_tokens else body
    return {**body, "prompt": text, **({"logprobs": 1} if with_tokens else {})}


def _answer(body: Mapping[str, Any], api: Api) -> dict[str, Any]:
    choice = body["choices"][0]
    text = choice["message"].get("content") or "" if api is Api.CHAT else choice["text"]
    if not isinstance(text, str):
        raise ValueError("the answer has no text")
    tokens: Any = None
    found = choice.get("logprobs")
    if isinstance(found, dict):
        tokens = found.get("tokens")
        if isinstance(found.get("content"), list):
            tokens = [one.get("token") for one in found["content"] if isinstance(one, dict)]
    known = isinstance(tokens, list) and all(isinstance(one, str) for one in tokens)
    return {"text": text, "tokens": tokens if known else None, "finish_reason": choice.get("finish_reason")}


def read_outputs(run: Path) -> dict[int, Output]:
    """Prompt number → answer, of a run directory; empty where nothing was asked. Lines that are none are skipped."""
    outputs: dict[int, Output] = {}
    for line in read_jsonl(run / OUTPUTS_FILE):
        index, text, tokens = line.get("index"), line.get("text"), line.get("tokens")
        if type(index) is not int or not 0 <= index < MOST_PROMPTS or not isinstance(text, str):
            continue
        known = isinstance(tokens, list) and all(isinstance(one, str) for one in tokens)
        outputs[index] = Output(text, tuple(tokens) if known and isinstance(tokens, list) else None)
    return outputs


@dataclass(frozen=True, slots=True)
class Divergence:
    """Of two arms. Numbers of prompts are means over pairs of runs."""

    prompts: int
    """Asked in every run."""
    between: float
    """Prompts whose answers differ between a run of the one arm and a run of the other."""
    within: float | None
    """Between two runs of the same arm, on fresh servers; None where no arm has two."""
    first: int | None
    """Earliest position at which arms differ."""
    unit: str
    """Of `first`: `token`, or `character` where the server tells no tokens."""
    word: str
    """`identical`, `within A/A`, `differs consistently`, `not decided` (too few runs to tell the two apart), or
    `differs` (nothing to judge by)."""
    text: str
    consistent: tuple[int, ...] = ()
    """Prompts to which each arm always gives the same answer, and the other arm another one."""
    p: float | None = None
    """Share of the ways to divide the runs between two arms that separate them as much; None where not needed."""

    def as_dict(self) -> dict[str, Any]:
        names = ("prompts", "between", "within", "first", "unit", "word", "text", "p")
        return {**{name: getattr(self, name) for name in names}, "consistent": list(self.consistent)}


def divergence(base: Sequence[Mapping[int, Output]], head: Sequence[Mapping[int, Output]]) -> Divergence | None:
    """`base`, `head`: the answers of each run of an arm; runs without any are left out. None if an arm has none, or no
    prompt was answered in all of them."""
    arms = [[run for run in arm if run] for arm in (base, head)]
    if not all(arms):
        return None
    prompts = sorted(set.intersection(*(set(run) for arm in arms for run in arm)))
    if not prompts:
        return None
    runs = [run for arm in arms for run in arm]
    differ = _differences(runs, prompts)
    """[runs, runs] number of prompts with different answers."""
    first_arm = np.array([[1.0] * len(arms[0]) + [0.0] * len(arms[1])])
    between, same = (float(one[0]) for one in _means(differ, first_arm))
    within = None if math.isnan(same) else same
    consistent = tuple(
        index
        for index in prompts
        if min(map(len, arms)) > 1
        and all(len({run[index].text for run in arm}) == 1 for arm in arms)
        and arms[0][0][index].text != arms[1][0][index].text
    )
    first, unit = _first_difference(arms, prompts)
    p = None
    if between == 0:
        word = "identical"
    elif within is None:
        word = "differs"
    elif within == 0 and consistent:
        word = "differs consistently"
    else:
        p = _share_of_splits(differ, len(arms[0]))
        if p <= _SIGNIFICANT:
            word = "differs consistently"
        else:
            word = "within A/A" if _least_share(*map(len, arms)) <= _SIGNIFICANT else "not decided"
    text = _words(len(prompts), between, within, word, None if first is None else f"{unit} {first + 1}")
    return Divergence(len(prompts), between, within, first, unit, word, text, consistent, p)


def _differences(runs: Sequence[Mapping[int, Output]], prompts: Sequence[int]) -> IntArray:
    kinds: dict[tuple[int, str], int] = {}
    """Answers, numbered."""
    table = np.array([[kinds.setdefault((i, run[i].text), len(kinds)) for i in prompts] for run in runs])
    return np.asarray((table[:, None, :] != table[None, :, :]).sum(axis=2), dtype=np.int64)


def _means(differ: IntArray, first: FloatArray) -> tuple[FloatArray, FloatArray]:
    """`first`: [splits, runs] 1.0 where a run belongs to the first arm. Per split the mean difference between a run of
    it and one of the others, and between two runs of the same arm (NaN where no arm has two)."""
    other = 1.0 - first
    reach = first @ differ
    between = (reach * other).sum(axis=1) / (first.sum(axis=1) * other.sum(axis=1))
    same = ((reach * first).sum(axis=1) + (other @ differ * other).sum(axis=1)) / 2
    sizes = np.stack([first.sum(axis=1), other.sum(axis=1)])
    pairs = (sizes * (sizes - 1) / 2).sum(axis=0)
    with np.errstate(invalid="ignore"):
        return between, same / pairs


def _share_of_splits(differ: IntArray, size: int) -> float:
    """Of all ways to choose `size` runs as the first arm, those that lie as far apart as the arms do: if arms do not
    matter, every way is as likely."""
    count = len(differ)
    if math.comb(count, size) <= _MOST_SPLITS:
        chosen: list[Sequence[int]] = list(itertools.combinations(range(count), size))
    else:
        rng = np.random.default_rng(0)
        chosen = [range(size), *(rng.permutation(count)[:size].tolist() for _ in range(_MOST_SPLITS))]
    splits = np.zeros((len(chosen), count))
    splits[np.arange(len(chosen))[:, None], np.array(chosen)] = 1.0
    between, within = _means(differ, splits)
    apart = between - within
    return float(np.mean(apart >= apart[0] - 1e-9))  # the first is how it was


def _least_share(base: int, head: int) -> float:
    """The least that `_share_of_splits` can be with so many runs: arms of one size may be exchanged."""
    return (2 if base == head else 1) / math.comb(base + head, base)


def _first_difference(arms: Sequence[Sequence[Mapping[int, Output]]], prompts: Sequence[int]) -> tuple[int | None, str]:
    """Position, from 0, at which a run of the one arm first differs from a run of the other, and in what it counts."""
    in_tokens = all(run[index].tokens is not None for arm in arms for run in arm for index in prompts)
    places = [
        _common(one[index].tokens or (), other[index].tokens or ())
        if in_tokens
        else _common(one[index].text, other[index].text)
        for one, other in itertools.product(*arms)
        for index in prompts
        if one[index].text != other[index].text
    ]
    return min(places, default=None), "token" if in_tokens else "character"


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """Length of what both begin with."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _words(prompts: int, between: float, within: float | None, word: str, first: str | None) -> str:
    of = f"of {prompts} prompts" if prompts != 1 else "of 1 prompt"
    if word == "identical":
        return f"greedy outputs are identical {of.replace('of', 'on', 1)}"
    line = f"greedy outputs differ between arms on {_number(between)} {of}, at the earliest from {first} on"
    if within is None:
        return f"{line}; no arm ran twice, so there is nothing to judge that by"
    closing = "not decided: too few runs" if word == "not decided" else word
    return f"{line}; the same arm against itself on fresh servers: {_number(within)} of {prompts}: {closing}"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value - round(value)) < 0.05 else f"{value:.1f}"
