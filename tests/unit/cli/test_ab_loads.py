"""Loads of a comparison are checked by the command that will run them, before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from atom.cli.ab_loads import BENCH_LOADS, load_argv, parse_load, suite_loads
from atom.diag.compare.arm_process import command_of
from atom.diag.compare.model import Arm, ArmKind, Half, Load
from atom.recipes.errors import UsageError
from atom.recipes.resolve import builtin_recipes
from atom.recipes.suite import builtin_suites


def test_a_load_as_it_is_typed() -> None:
    load = parse_load("NAME=random --random-input-len 2048 --max-concurrency 64")
    assert load == Load(name="NAME", bench="random", options={"random-input-len": 2048, "max-concurrency": 64})


def test_aliases_lists_flags_and_what_is_the_servers() -> None:
    load = parse_load(
        "random --input-len=64 --goodput ttft:500 tpot:30 --ignore-eos --no-gpu-telemetry --recipe simulated "
        "--primary output_throughput --margin 2.5% -- --sim-base-ms 8 --help"
    )
    assert load.options == {
        "random-input-len": 64,
        "goodput": ["ttft:500", "tpot:30"],
        "ignore-eos": True,
        "no-gpu-telemetry": True,
    }
    assert (load.recipe, load.server_args) == ("simulated", ("--sim-base-ms", "8", "--help"))
    assert (load.primary, load.margin_pct) == ("output_throughput", 2.5)


def test_names_say_what_the_load_is() -> None:
    assert parse_load("random --input-len 64 --output-len 8 --max-concurrency 4").name == "random-64-8-c4"
    assert parse_load("random --request-rate 2.5").name == "random-r2.5"


def test_files_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a b c"}\n')
    monkeypatch.chdir(tmp_path)
    load = parse_load("custom --dataset-path prompts.jsonl --custom-output-len 4 --num-prompts 1 --recipe ./mine.yaml")
    assert load.options["dataset-path"] == str(tmp_path / "prompts.jsonl")
    assert load.recipe == str(tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a load as `atom bench` takes it"),
        ("random 'x", "No closing quotation"),
        ("=random", "there is no name before '='"),
        ("sweep --max-concurrency auto", "'sweep' is no load of `atom bench`; there are random, sharegpt"),
        ("random --input-length 4", "No such option: --input-length"),
        ("random --num-prompts many", "Invalid value for '--num-prompts'"),
        ("random --num-prompts", "--num-prompts.* requires an argument"),
        ("random --num-prompts 0", "--num-prompts must be at least 1, got 0"),
        ("random --request-rate fast", "--request-rate must be a number of requests per second"),
        ("random --goodput speed:3", "--goodput knows ttft, tpot and e2el"),
        ("random --burstiness 2", "--burstiness says how requests arrive at a --request-rate"),
        ("random 2048", "'2048' is no option; server arguments stand after --"),
        ("random --help", "for help use `atom bench random --help`"),
        ("random --margin", "--margin needs a value"),
        ("random --primary speed", "--primary must be one of itl_p50, .*; got 'speed'"),
        ("random --primary server_step_p50", "--primary must be one of"),
        ("random --margin wide", "--margin must be a percentage above 0"),
        ("random --seed 3", "--seed is the comparison's to set: use --seed of ab-compare"),
        ("random --base-url http://127.0.0.1:1", "--base-url is the comparison's to set: an arm is given as a URL"),
        ("random --output-dir x", "--output-dir is the comparison's to set"),
        ("random --api-key abc", "--api-key is the comparison's to set: set OPENAI_API_KEY"),
        ("random --server-cpus 0", "--server-cpus is the comparison's to set: use --cpus"),
        ("custom --dataset-path /nonexistent", "/nonexistent"),
    ],
)
def test_what_could_not_begin_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        parse_load(text)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("--load ")


def test_built_in_suites_are_loads_of_the_command_line() -> None:
    for name in builtin_suites():
        for load in suite_loads(name):
            assert load.bench in BENCH_LOADS
            assert load.recipe is None or load.recipe in builtin_recipes()
            arm = Arm(label="a", kind=ArmKind.RECIPE, spec="embedded", recipe="embedded")
            assert command_of(arm, load, Half(name="all"), directory=Path("out"))[:2] == ["bench", load.bench]


def test_the_cpu_suite_takes_about_five_minutes_on_two_cores() -> None:
    """Three pairs of two matched runs, two arms one after the other."""
    seconds = [load.seconds for load in suite_loads("cpu")]
    assert 240 <= sum(one or 0 for one in seconds) * 3 * 2 * 2 <= 360


def test_a_suite_with_an_unknown_flag_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nloads: [{name: one, bench: random, options: {input-length: 3}}]\n")
    with pytest.raises(UsageError, match=rf"suite {path}, load one: No such option: --input-length"):
        suite_loads(str(path))


def test_a_suite_with_an_unknown_primary_metric_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nloads: [{name: one, bench: random, primary: speed}]\n")
    with pytest.raises(UsageError, match=rf"suite {path}, load one: primary must be one of itl_p50.* got 'speed'"):
        suite_loads(str(path))


def test_options_are_the_same_after_a_round_trip() -> None:
    load = parse_load("random --input-len 64 --goodput ttft:500 tpot:30 --ignore-eos --extra-body '{\"a\": -1}'")
    words = " ".join(f"'{word}'" for word in load_argv(load.options))
    assert parse_load(f"random {words}").options == load.options
