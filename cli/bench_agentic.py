"""`atom bench aiperf-agentic`: recorded or generated agent sessions, replayed with their histories, sub-agents and
pauses, by this project's client or by an installed AIPerf."""

from __future__ import annotations

import secrets
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from atom.bench.agentic.aiperf_client import AiperfClient, find_aiperf
from atom.bench.agentic.chat_overhead import ask_overhead
from atom.bench.agentic.generate import GenerateConfig, generate_traces, write_traces
from atom.bench.agentic.load import AgenticLoad, CacheBust
from atom.bench.agentic.scenario_load import ScenarioLoad
from atom.bench.agentic.validity import SCENARIOS, Scenario, find_scenario
from atom.bench.agentic.weka import Traces, load_traces
from atom.bench.datasets.text import word_list
from atom.bench.load import Api, Endpoint
from atom.bench.target import Target
from atom.cli import load_options as load
from atom.cli.bench_checks import parse_extra_body
from atom.cli.bench_command import SERVER_ARGUMENTS, bench
from atom.cli.load_choices import BACKENDS, LOAD_DEFAULTS, limits, sampling
from atom.cli.load_options import LOAD, SAMPLING, SERVER
from atom.cli.load_run import LoadFactory
from atom.cli.option_groups import evidence_options, output_options, sampling_options, server_options, with_options
from atom.cli.progress import PLAIN_PERIOD_S
from atom.cli.rank_run import rank_count
from atom.diag.metrics_target import parse_metrics_targets
from atom.recipes.errors import UsageError

__all__ = ["CONTEXT_SETTINGS", "EXAMPLES", "aiperf_agentic"]

CONTEXT_SETTINGS: Final = SERVER_ARGUMENTS
EXAMPLES: Final = (
    "Examples:\n\n"
    "  atom bench aiperf-agentic --recipe simulated --generate --concurrency 8 --duration 60 --unsafe-override\n\n"
    "  atom bench aiperf-agentic --port 8000 --input-file traces/ --concurrency 32 --max-context-length 131072\n\n"
    "  atom bench aiperf-agentic --port 8000 --input-file traces/ --concurrency 32 --client aiperf --tokenizer DIR"
)
NATIVE, AIPERF = "native", "aiperf"
SESSIONS, SCENARIO, GENERATOR = "Sessions", "Scenario", "Generated sessions"
DEFAULT_SCENARIO: Final = "inferencex-agentx-mvp"
CONTEXT_GAUGES: Final = "ATOM_METRICS_PER_REQUEST_CONTEXT"
"""Of servers that are started for the run: /metrics has the context of each request."""
_NONCE_BYTES: Final = 4
_CLIENTS: Final = (NATIVE, AIPERF)
_FLAGS: Final = GenerateConfig()
_GENERATE_ONLY: Final = ("sessions", "turns", "input_len", "output_len", "shared_prefix", "subagents", "block_size")


@with_options(server_options, sampling_options, evidence_options, output_options)
def aiperf_agentic(
    ctx: typer.Context,
    scenario: Annotated[
        str, typer.Option(help=f"What is fixed: {', '.join(SCENARIOS)}, or none.", rich_help_panel=SCENARIO)
    ] = DEFAULT_SCENARIO,
    unsafe_override: Annotated[
        bool,
        typer.Option(
            "--unsafe-override",
            help="Run although options go against the scenario; the result does not count for it.",
            rich_help_panel=SCENARIO,
        ),
    ] = False,
    input_file: Annotated[
        Path | None,
        typer.Option(
            "--input-file",
            "--dataset-path",
            metavar="PATH",
            help="Weka traces: a .json or .jsonl file, or a directory of them.",
            rich_help_panel=SESSIONS,
        ),
    ] = None,
    generate: Annotated[
        bool, typer.Option("--generate", help="Make sessions up instead, from the seed.", rich_help_panel=SESSIONS)
    ] = False,
    num_dataset_entries: Annotated[
        int | None, typer.Option(help="Take the first so many sessions.", rich_help_panel=SESSIONS)
    ] = None,
    max_context_length: Annotated[
        int | None,
        typer.Option(help="Leave out sessions with a prompt and answer longer than this.", rich_help_panel=SESSIONS),
    ] = None,
    num_sessions: Annotated[
        int | None,
        typer.Option(help="End after so many sessions, if the duration is not over before.", rich_help_panel=SESSIONS),
    ] = None,
    trajectory_start_min_ratio: Annotated[
        float, typer.Option(help="A lane's first session begins from this share of its time on", rich_help_panel=LOAD)
    ] = 0.25,
    trajectory_start_max_ratio: Annotated[float, typer.Option(help="up to this one.", rich_help_panel=LOAD)] = 0.75,
    warmup_requests_per_lane: Annotated[
        int, typer.Option(help="One-token requests of each lane in the warm-up.", rich_help_panel=LOAD)
    ] = 0,
    warmup_grace_period: Annotated[
        float | None,
        typer.Option(help="Begin no warm-up request after so many seconds of it.", rich_help_panel=LOAD),
    ] = None,
    trace_idle_gap_cap: Annotated[
        str,
        typer.Option(
            "--trace-idle-gap-cap-seconds", help="Longest pause within a session, or none.", rich_help_panel=LOAD
        ),
    ] = "300",
    system_idle_gap_cap: Annotated[
        str,
        typer.Option(
            "--system-idle-gap-cap-seconds", help="Longest time with nothing under way, or none.", rich_help_panel=LOAD
        ),
    ] = "10",
    cache_bust: Annotated[
        str,
        typer.Option(help=f"Where each session's marker goes: {', '.join(CacheBust)}.", rich_help_panel=LOAD),
    ] = str(CacheBust.FIRST_TURN_PREFIX),
    cache_bust_nonce: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="Goes into every marker; default: another one for each run.", rich_help_panel=LOAD
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Sessions alive at once.", rich_help_panel=LOAD)] = 1,
    duration: Annotated[
        float,
        typer.Option("--benchmark-duration", "--duration", help="Seconds; 900 at least count.", rich_help_panel=LOAD),
    ] = 1800.0,
    grace_period: Annotated[
        float,
        typer.Option(
            "--benchmark-grace-period",
            "--grace-period",
            help="Cancel what still runs so many seconds after that.",
            rich_help_panel=LOAD,
        ),
    ] = 30.0,
    seed: Annotated[
        int,
        typer.Option("--seed", "--random-seed", help="Same seed: same sessions, prompts, order.", rich_help_panel=LOAD),
    ] = 0,
    workers: Annotated[int, typer.Option(help="Processes that share the lanes.", rich_help_panel=LOAD)] = 1,
    stats_interval: Annotated[
        float, typer.Option(help="Seconds between lines of progress, where there is no terminal.", rich_help_panel=LOAD)
    ] = PLAIN_PERIOD_S,
    client: Annotated[
        str, typer.Option(help="Who sends: native, or an installed aiperf.", rich_help_panel=LOAD)
    ] = NATIVE,
    aiperf_executable: Annotated[
        str | None, typer.Option(metavar="PATH", help="For --client aiperf; default: on PATH.", rich_help_panel=LOAD)
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="A tokenizer.json or its directory: for token-exact text prompts, and for AIPerf.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    vocab_size: load.VocabSizeOption = None,
    generate_sessions: Annotated[int, typer.Option(help="How many.", rich_help_panel=GENERATOR)] = _FLAGS.num_sessions,
    generate_turns: Annotated[
        int | None, typer.Option(help="Median of the main agent's requests.", rich_help_panel=GENERATOR)
    ] = _FLAGS.turns,
    generate_input_len: Annotated[
        int, typer.Option(help="Mean prompt, in tokens.", rich_help_panel=GENERATOR)
    ] = _FLAGS.input_len,
    generate_output_len: Annotated[
        int, typer.Option(help="Median answer, in tokens.", rich_help_panel=GENERATOR)
    ] = _FLAGS.output_len,
    generate_shared_prefix: Annotated[
        float | None,
        typer.Option(
            help="Share of prompt tokens sent before; default: 0.96, or as --generate-turns leads to.",
            rich_help_panel=GENERATOR,
        ),
    ] = _FLAGS.shared_prefix,
    generate_subagents: Annotated[
        float, typer.Option(help="Share of turns that begin sub-agents.", rich_help_panel=GENERATOR)
    ] = _FLAGS.subagents,
    generate_block_size: Annotated[
        int, typer.Option(help="Tokens per hashed block.", rich_help_panel=GENERATOR)
    ] = _FLAGS.block_size,
    backend: Annotated[
        str,
        typer.Option(
            "--endpoint-type",
            "--backend",
            help="What to speak: chat, completions, or a name of atom bench random.",
            rich_help_panel=SERVER,
        ),
    ] = "chat",
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Generate to max_tokens.", rich_help_panel=SAMPLING)
    ] = True,
    **given: Any,
) -> int:
    """Agent sessions as they were recorded: each turn sends the history so far, sub-agents run beside, pauses are kept.

    --concurrency sessions are alive at once; a lane begins in the middle of its first one, and takes up another when it
    is over. Flags and defaults are those of AIPerf's scenario. With --recipe, arguments after `--` go to the server.
    """
    own = {name: value for name, value in locals().items() if name not in ("given", "ctx")}
    return _run({**LOAD_DEFAULTS, **given, **own, "ctx": ctx})


def _run(given: dict[str, Any]) -> int:
    given["backend"] = _BACKENDS.get(given["backend"], given["backend"])
    if given["backend"] not in BACKENDS:
        known = ", ".join([*_BACKENDS, *BACKENDS])
        raise UsageError(f"--endpoint-type must be one of {known}; got {given['backend']!r}")
    given["trace_idle_gap_cap"] = _cap("--trace-idle-gap-cap-seconds", given["trace_idle_gap_cap"])
    given["system_idle_gap_cap"] = _cap("--system-idle-gap-cap-seconds", given["system_idle_gap_cap"])
    return bench("aiperf-agentic", given, _load, check=_check, server_env={CONTEXT_GAUGES: "1"})


_BACKENDS: Final = {"chat": "openai-chat", "completions": "openai"}
"""AIPerf's names."""


def _cap(flag: str, text: str) -> float | None:
    if text == "none":
        return None
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{flag} must be a number of seconds, or none; got {text!r}") from None


def _check(given: dict[str, Any]) -> None:
    """UsageError for what is wrong, for options that would be ignored, and for what goes against the scenario."""
    for name, known in (("client", _CLIENTS), ("cache_bust", tuple(CacheBust))):
        if given[name] not in known:
            raise UsageError(f"--{name.replace('_', '-')} must be one of {', '.join(known)}; got {given[name]!r}")
    if (given["input_file"] is None) != given["generate"]:
        raise UsageError("sessions come from --input-file PATH, or are made up with --generate: give one of them")
    if not given["generate"]:
        for name in _GENERATE_ONLY:
            if _is_given(given, f"generate_{name}"):
                raise UsageError(f"--generate-{name.replace('_', '-')} is for --generate, which is not given")
    if given["cache_bust_nonce"] is not None and given["cache_bust"] == CacheBust.NONE:
        raise UsageError("--cache-bust-nonce goes into markers, and --cache-bust none has none: leave it out")
    (_check_native if given["client"] == NATIVE else _check_aiperf)(given)
    if not 0 < given["stats_interval"] < inf:
        raise UsageError(f"--stats-interval must be positive and finite, got {given['stats_interval']:g}")
    conflicts = _conflicts(given)
    if conflicts and not given["unsafe_override"]:
        raise UsageError(
            f"scenario {given['scenario']} does not allow {'; '.join(conflicts)}. --unsafe-override runs it anyway, "
            "and the result does not count for the scenario"
        )


def _conflicts(given: dict[str, Any]) -> list[str]:
    """What goes against the scenario."""
    scenario = find_scenario(given["scenario"])
    return [] if scenario is None else scenario.conflicts(given)


def _check_native(given: dict[str, Any]) -> None:
    if given["aiperf_executable"] is not None:
        raise UsageError("--aiperf-executable is for --client aiperf, which is not given")
    chat = BACKENDS.get(given["backend"]) is Api.CHAT
    if chat and given["vocab_size"] is not None:
        raise UsageError("--vocab-size is for token ids, and a chat's prompts are text: leave it out")
    if not chat and given["tokenizer"] is not None:
        raise UsageError("--tokenizer is for text, and completions get token ids: leave it out, or use chat")
    processes = given["workers"] * rank_count()
    for flag, lanes in (("--concurrency", given["concurrency"]), ("--num-sessions", given["num_sessions"])):
        if lanes is not None and 0 < lanes < processes:
            raise UsageError(
                f"{flag} {lanes} is less than the {processes} processes that share the sessions: some would have none"
            )
    if processes > 1 and given["system_idle_gap_cap"] is not None:
        which = "--workers" if given["workers"] > 1 else "MPI ranks"
        raise UsageError(
            f"--system-idle-gap-cap-seconds {given['system_idle_gap_cap']:g}: whether all sessions are idle is seen by "
            f"one process alone, not by {processes}: say none, or leave out {which}"
        )


def _check_aiperf(given: dict[str, Any]) -> None:
    for flag, value in (
        ("--insecure", given["insecure"]),
        ("--save-detailed", given["save_detailed"]),
        ("--cache-bust-nonce", given["cache_bust_nonce"] is not None),
    ):
        if value:
            raise UsageError(f"{flag} is for --client native: AIPerf has nothing like it here")


def _is_given(given: dict[str, Any], name: str) -> bool:
    source = given["ctx"].get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _load(given: dict[str, Any]) -> LoadFactory:
    nonce = given["cache_bust_nonce"]
    if nonce is None:
        marked = given["client"] == NATIVE and given["cache_bust"] != CacheBust.NONE
        nonce = secrets.token_hex(_NONCE_BYTES) if marked else ""
    return _factory(given, _traces(given), nonce)


def _factory(given: dict[str, Any], traces: Traces, nonce: str) -> LoadFactory:
    scenario: Scenario | None = find_scenario(given["scenario"])
    plan = AgenticLoad(
        sessions=traces.sessions,
        api=BACKENDS[given["backend"]],
        model=given["model"] or "",
        concurrency=given["concurrency"],
        seed=given["seed"],
        num_sessions=given["num_sessions"],
        start_min_ratio=given["trajectory_start_min_ratio"],
        start_max_ratio=given["trajectory_start_max_ratio"],
        warmup_requests_per_lane=given["warmup_requests_per_lane"],
        warmup_grace_period=given["warmup_grace_period"],
        trace_idle_gap_cap=given["trace_idle_gap_cap"],
        system_idle_gap_cap=given["system_idle_gap_cap"],
        cache_bust=CacheBust(given["cache_bust"]),
        nonce=nonce,
        vocab_size=given["vocab_size"],
        tokenizer=given["tokenizer"],
        ignore_eos=given["ignore_eos"],
        continuous_usage_stats=given["continuous_usage_stats"],
        sampling=sampling(given),
        extra_body=parse_extra_body(given["extra_body"]),
    )
    wrapped = ScenarioLoad(
        load=plan,
        scenario=None if scenario is None else scenario.name,
        conflicts=tuple(_conflicts(given)),
        client=given["client"],
        traces=_described(given),
        left_out=traces.left_out,
        nonce_drawn=bool(nonce) and given["cache_bust_nonce"] is None,
    )

    def make(endpoint: Endpoint, target: Target | None) -> ScenarioLoad:
        if target is None:
            return wrapped
        vocab = plan.vocab_size if plan.vocab_size is not None else target.vocab_size
        overhead = None
        if plan.api is Api.CHAT and plan.tokenizer is not None and given["client"] == NATIVE:
            overhead = ask_overhead(endpoint, word_list(plan.tokenizer).words[0], plan.extra_body)
        return replace(wrapped, load=replace(plan, model=endpoint.model, vocab_size=vocab, overhead=overhead))

    run = _aiperf(given, wrapped) if given["client"] == AIPERF else None
    return LoadFactory(
        make=make,
        options=limits(given),
        workers=given["workers"],
        run=run,
        stats_interval=given["stats_interval"],
        nonce=nonce,
        with_nonce=partial(_factory, given, traces),
    )


def _generate_config(given: dict[str, Any]) -> GenerateConfig:
    return GenerateConfig(
        num_sessions=given["generate_sessions"],
        turns=given["generate_turns"],
        input_len=given["generate_input_len"],
        output_len=given["generate_output_len"],
        shared_prefix=given["generate_shared_prefix"],
        subagents=given["generate_subagents"],
        block_size=given["generate_block_size"],
        max_context_length=given["max_context_length"],
        model=given["model"] or "model",
    )


def _traces(given: dict[str, Any]) -> Traces:
    most = given["num_dataset_entries"]
    if most is not None and most < 1:
        raise UsageError(f"--num-dataset-entries must be at least 1, got {most}")
    if given["generate"]:
        return Traces(generate_traces(_generate_config(given), given["seed"])[:most], {})
    return load_traces(given["input_file"], max_sessions=most, max_context_length=given["max_context_length"])


def _described(given: dict[str, Any]) -> dict[str, Any]:
    """Where the sessions come from, for run.json."""
    facts: dict[str, Any] = {"max_context_length": given["max_context_length"]}
    if given["generate"]:
        return {"generated": {name: given[f"generate_{name}"] for name in _GENERATE_ONLY}, **facts}
    return {"input_file": str(given["input_file"]), **facts, "num_dataset_entries": given["num_dataset_entries"]}


def _aiperf(given: dict[str, Any], load_: ScenarioLoad) -> AiperfClient:
    config = _generate_config(given) if given["generate"] else None

    def traces(directory: Path) -> Path:
        if config is None:
            return Path(given["input_file"])
        write_traces(config, given["seed"], directory)
        return directory

    return AiperfClient(
        executable=find_aiperf(given["aiperf_executable"]),
        traces=traces,
        load=load_,
        unsafe_override=given["unsafe_override"],
        max_context_length=given["max_context_length"],
        num_dataset_entries=given["num_dataset_entries"],
        server_metrics=tuple(one.url for one in parse_metrics_targets(given["server_metrics"] or [])),
    )
