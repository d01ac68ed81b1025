"""A plan carried out on a virtual clock, by an executor that does what it is told: what is next, what is left out, and
what an interrupted comparison does when it goes on."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.diag.compare.conductor import Conductor, Ending, EndReason, Event, Progress, given_up
from atom.diag.compare.journal import RUNS_FILE, DonePair, Journal, Records, read_records
from atom.diag.compare.model import Arm, ArmKind, Comparison, Half, Load, MatchedRun, Placement, RunResult
from atom.diag.compare.plan import Pair, Plan, make_plan
from atom.recipes.errors import ExitStatus, UsageError

SERIAL = Placement(halves=(Half(name="all"),), reason="one device")
HALVES = Placement(halves=(Half(name="0"), Half(name="1")), reason="two devices")


class VirtualClock:
    def __init__(self) -> None:
        self.ns = 0
        self.slept: list[float] = []

    def now_ns(self) -> int:
        return self.ns

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.pass_(seconds)

    def pass_(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9)


What = Callable[[MatchedRun, str, int], str]
"""What becomes of an arm's part: (matched run, arm, how many of the arm's runs there were) → a stage or "kill"."""


class Script:
    """An executor. `seconds`: of a matched run under a load."""

    def __init__(
        self, out: Path, clock: VirtualClock, what: What = lambda *_: "done", seconds: Mapping[str, float] | None = None
    ) -> None:
        self.out, self.clock, self.what, self.seconds = out, clock, what, seconds or {}
        self.runs: list[str] = []
        self.directories: list[Path] = []
        self.counts: dict[str, int] = {}

    def execute(self, matched: MatchedRun, directories: tuple[Path, Path]) -> tuple[RunResult, RunResult]:
        for directory in directories:
            directory.mkdir(parents=True)  # a new one, or this raises
            self.directories.append(directory)
        began = self.clock.ns
        self.clock.pass_(self.seconds.get(matched.load, 10.0))
        stages = []
        for one in matched.runs:
            self.counts[one.arm] = self.counts.get(one.arm, 0) + 1
            stages.append(self.what(matched, one.arm, self.counts[one.arm]))
        if "kill" in stages:
            raise KeyboardInterrupt
        self.runs.append(matched.key)
        base, head = (
            RunResult(
                matched=matched.key,
                arm=one.arm,
                side=side,
                directory=str(directories[side].relative_to(self.out)),
                status=ExitStatus.OK if stage == "done" else ExitStatus.INTERRUPTED if stage == "well" else 1,
                started_ns=began,
                ended_ns=self.clock.ns,
                stage="start" if stage == "well" else stage,
                problem=None if stage == "done" else "no such option",
            )
            for side, (one, stage) in enumerate(zip(matched.runs, stages, strict=True))
        )
        return base, head


def arm(label: str) -> Arm:
    return Arm(label=label, kind=ArmKind.REF, spec=label)


def plan_of(
    heads: int = 1, loads: int = 1, placement: Placement = HALVES, seconds: float | None = 10, **more: Any
) -> Plan:
    labels = ["base", *(f"head-{number}" for number in range(heads))]
    return make_plan(
        [arm(label) for label in labels],
        [Comparison(base="base", head=label) for label in labels[1:]],
        [Load(name=f"load-{number}", bench="random", seconds=seconds) for number in range(loads)],
        placement,
        **more,
    )


def conduct(
    plan: Plan,
    out: Path,
    what: What = lambda *_: "done",
    *,
    seconds: Mapping[str, float] | None = None,
    decide: Callable[[tuple[str, str], Sequence[DonePair]], bool] | None = None,
    **more: Any,
) -> tuple[Ending, Script, list[Progress]]:
    clock = VirtualClock()
    script = Script(out, clock, what, seconds)
    told: list[Progress] = []
    with Journal(out) as journal:
        ending = Conductor(plan, script, clock, journal, told.append, decide, **more).run()
    return ending, script, told


def keys(pairs: Sequence[Pair]) -> list[str]:
    return [run.key for pair in pairs for run in pair.runs]


def test_pairs_are_made_in_the_order_of_the_schedule(tmp_path: Path) -> None:
    plan = plan_of(heads=2, loads=2, pairs=2, aa_pairs=1, cool_down_s=3)
    ending, script, told = conduct(plan, tmp_path)
    assert script.runs == keys(plan.schedule)
    assert ending == Ending(reason=EndReason.COMPLETE, text="all pairs were made")
    assert script.clock.slept == [3] * (len(script.runs) - 1)  # between matched runs, and not before the first
    assert len(script.directories) == len(set(script.directories)) == 2 * len(script.runs)
    assert {path.parent.name for path in script.directories} == {"base", "head-0", "head-1"}
    assert (told[0].done, told[0].total, told[0].remaining_s) == (0, len(plan.schedule), 13 * len(script.runs))
    assert (told[-1].done, told[-1].event, told[-1].remaining_s) == (len(plan.schedule), Event.PAIR_ENDED, 0)
    records = read_records(tmp_path)
    assert [one.pair.key for one in records.done(plan)] == [pair.key for pair in plan.schedule]
    assert not half_done(records, plan)
    assert not records.superseded


def test_a_deadline_ends_on_a_complete_pair(tmp_path: Path) -> None:
    plan = plan_of(pairs=5, deadline_s=50)
    ending, script, told = conduct(plan, tmp_path)
    assert script.runs == keys(plan.schedule[:2])  # a third would end after 60 s
    assert ending.reason is EndReason.DEADLINE
    assert ending.left_out == plan.schedule[2:]
    assert ending.text == "3 pairs left out at the deadline"
    assert [one.pair.pair for one in told if one.event is Event.SKIPPED] == [2, 3, 4]


def test_what_was_measured_counts_for_the_deadline_and_not_what_was_declared(tmp_path: Path) -> None:
    plan = plan_of(loads=2, pairs=3, seconds=1, deadline_s=100)
    ending, script, _ = conduct(plan, tmp_path, seconds={"load-0": 20, "load-1": 5})
    made = [pair for pair in plan.schedule if pair not in ending.left_out]
    assert script.runs == keys(made)
    # 40 s and 10 s a pair: two of each take the whole time, and the third short one has none.
    assert sorted(pair.load for pair in made) == ["load-0", "load-0", "load-1", "load-1"]
    assert script.clock.ns == 100e9


def test_a_deadline_that_is_over_begins_nothing(tmp_path: Path) -> None:
    ending, script, _ = conduct(plan_of(seconds=None), tmp_path, deadline_ns=0)
    assert (script.runs, ending.reason) == ([], EndReason.DEADLINE)


def test_an_unknown_load_is_tried_before_the_deadline(tmp_path: Path) -> None:
    plan = plan_of(seconds=None, pairs=3, deadline_s=30)
    ending, script, told = conduct(plan, tmp_path)
    assert script.runs == keys(plan.schedule[:1])
    assert told[0].remaining_s is None
    assert ending.reason is EndReason.DEADLINE


def test_an_arm_that_does_not_start_twice_is_given_up_and_the_others_go_on(tmp_path: Path) -> None:
    plan = plan_of(heads=2, pairs=3)

    def what(matched: MatchedRun, name: str, count: int) -> str:
        if name == "head-0":
            return "start"
        return "well" if "head-0" in matched.comparison else "done"  # its counterpart is blamed for nothing

    ending, script, told = conduct(plan, tmp_path, what)
    assert sum("head-0" in key for key in script.runs) == 2
    assert sum("head-1" in key for key in script.runs) == 6
    reason = "did not start 2 times in a row: no such option"
    assert ending.given_up == {"head-0": reason}
    assert ending.reason is EndReason.GIVEN_UP
    assert ending.text == f"2 pairs left out: head-0: {reason}"
    assert [one.text for one in told if one.event is Event.GIVEN_UP] == [f"head-0: {reason}"]
    assert given_up(plan, read_records(tmp_path)) == ending.given_up


def test_a_control_that_does_not_start_ends_all(tmp_path: Path) -> None:
    ending, script, _ = conduct(plan_of(heads=2, aa_pairs=1), tmp_path, lambda _, name, __: "prepare")
    assert len(script.runs) == 2  # both sides of a matched run are one try
    assert list(ending.given_up) == ["base"]


def test_an_arm_is_given_up_under_the_loads_whose_server_does_not_start(tmp_path: Path) -> None:
    servers: list[dict[str, Any]] = [
        {"recipe": "a"},
        {"recipe": "b"},
        {"recipe": "b"},
        {"recipe": "b", "env": {"X": "1"}},
    ]
    plan = make_plan(
        [arm("base"), arm("head")],
        [Comparison(base="base", head="head")],
        [Load(name=f"load-{number}", bench="random", **server) for number, server in enumerate(servers)],
        HALVES,
        pairs=3,
    )

    def what(matched: MatchedRun, name: str, count: int) -> str:
        return "start" if name == "head" and matched.load in ("load-1", "load-2") else "done"

    ending, script, _ = conduct(plan, tmp_path, what)
    assert sorted(ending.given_up) == ["head under load-1", "head under load-2"]
    counts = [sum(f"load-{number}" in key for key in script.runs) for number in range(4)]
    assert (counts[0], counts[1] + counts[2], counts[3]) == (
        6,
        2,
        6,
    )  # what failed with one is not tried with the other
    assert given_up(plan, read_records(tmp_path)) == ending.given_up


def test_failures_that_are_not_in_a_row_give_nobody_up(tmp_path: Path) -> None:
    plan = plan_of(pairs=3)
    ending, script, _ = conduct(plan, tmp_path, lambda _, name, count: "start" if count % 2 else "done")
    assert script.runs == keys(plan.schedule)
    assert ending.reason is EndReason.COMPLETE


def test_a_load_that_fails_is_not_run_again(tmp_path: Path) -> None:
    plan = plan_of(pairs=2)
    _, script, _ = conduct(plan, tmp_path, lambda _, name, count: "load" if name == "head-0" else "done")
    assert script.runs == keys(plan.schedule)


def test_until_decided_looks_after_each_pair_and_ends_a_stream_alone(tmp_path: Path) -> None:
    plan = plan_of(loads=2, pairs=2, until_decided=True, max_pairs=6)
    looks: list[tuple[str, list[int]]] = []

    def decide(stream: tuple[str, str], pairs: Sequence[DonePair]) -> bool:
        looks.append((stream[1], [one.pair.pair for one in pairs]))
        return len(pairs) == {"load-0": 3, "load-1": 5}[stream[1]]

    ending, script, told = conduct(plan, tmp_path, decide=decide)
    for load, most in (("load-0", 3), ("load-1", 5)):
        assert [pairs for one, pairs in looks if one == load] == [list(range(n)) for n in range(2, most + 1)]
        assert sum(load in key for key in script.runs) == 2 * most
    assert ending.reason is EndReason.COMPLETE
    assert sorted(ending.decided) == [("base..head-0", "load-0"), ("base..head-0", "load-1")]
    assert ending.left_out == ()
    assert told[-1].total == told[-1].done == 8
    assert (told[0].at_most, told[-1].at_most) == (12, 8)  # a stream that is decided gets no more


def test_until_decided_ends_at_max_pairs(tmp_path: Path) -> None:
    ending, script, _ = conduct(plan_of(until_decided=True, max_pairs=4), tmp_path, decide=lambda *_: False)
    assert (len(script.runs), ending.reason, ending.decided) == (8, EndReason.COMPLETE, ())


def test_a_decision_is_made_again_when_a_comparison_goes_on(tmp_path: Path) -> None:
    plan = plan_of(pairs=1, until_decided=True, max_pairs=5)
    conduct(plan, tmp_path, decide=lambda _, pairs: len(pairs) == 2)
    ending, script, _ = conduct(plan, tmp_path, decide=lambda _, pairs: len(pairs) == 2)
    assert (script.runs, ending.decided) == ([], (("base..head-0", "load-0"),))


def half_done(records: Records, plan: Plan) -> list[RunResult]:
    """Results of pairs that are not complete."""
    done = {run.key for one in records.done(plan) for run in one.pair.runs}
    return [one for one in records.current.values() if one.matched not in done]


def test_an_interrupted_pair_is_made_again_in_whole(tmp_path: Path) -> None:
    plan = plan_of(pairs=2)
    with pytest.raises(KeyboardInterrupt):
        conduct(plan, tmp_path, lambda _, name, count: "kill" if count == 4 else "done")
    before = read_records(tmp_path)
    assert [one.pair.pair for one in before.done(plan)] == [0]
    assert [one.directory for one in half_done(before, plan)] == ["arms/base/run-3", "arms/head-0/run-3"]

    _, script, _ = conduct(plan, tmp_path)
    assert script.runs == keys(plan.schedule[1:])
    assert [path.name for path in script.directories] == ["run-5", "run-5", "run-6", "run-6"]  # run-4 was killed
    after = read_records(tmp_path)
    assert len(after.done(plan)) == 2
    assert [one.directory for one in after.superseded] == ["arms/base/run-3", "arms/head-0/run-3"]
    assert not half_done(after, plan)


def test_an_arm_gets_its_tries_again_when_a_comparison_goes_on(tmp_path: Path) -> None:
    plan = plan_of(pairs=3)
    conduct(plan, tmp_path, lambda _, name, count: "start" if name == "head-0" else "well")
    ending, script, _ = conduct(plan, tmp_path)
    assert script.runs == keys(plan.schedule[1:])  # what failed is done: it is not made again
    assert ending.given_up == {}
    assert given_up(plan, read_records(tmp_path)) == {}


def test_two_writers_exclude_each_other(tmp_path: Path) -> None:
    with Journal(tmp_path), pytest.raises(UsageError, match="is being written by another process"):
        Journal(tmp_path)


def test_lines_about_other_places_count_for_nothing(tmp_path: Path) -> None:
    plan = plan_of(pairs=1)
    conduct(plan, tmp_path)
    (done,) = read_records(tmp_path).done_of(plan, plan.streams[0])
    assert done.has_records
    file = tmp_path / "runs.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for directory in (
        "/etc",
        "../other/arms/base/run-1",
        "arms/base/../../run-1",
        "arms/base/run-1/..",
        "arms",
        "",
        ".",
    ):
        file.write_text("".join(json.dumps({**line, "directory": directory}) + "\n" for line in lines))
        found = read_records(tmp_path)
        assert (found.lines, found.malformed) == ((), len(lines))
    file.write_text(
        "".join(json.dumps({**line, "arm": "base", "directory": "arms/base/run-1"}) + "\n" for line in lines)
    )
    assert read_records(tmp_path).done(plan) == []  # the head's are not of the head


def test_recorded_arms_have_their_records_wherever_they_are(tmp_path: Path) -> None:
    arms = [Arm(label=one, kind=ArmKind.RECORDED, spec=one, recorded=(f"/somewhere/{one}",)) for one in "xy"]
    plan = make_plan(
        arms,
        [Comparison(base="x", head="y")],
        [Load(name="recorded", bench="recorded")],
        Placement(halves=(Half(name="recorded"),), reason=""),
    )
    plan.write(tmp_path)
    line = {"matched": plan.schedule[0].runs[0].key, "status": 0, "started_ns": 1, "ended_ns": 1}
    places = [("x", 0, "/somewhere/x"), ("y", 1, "/somewhere/y"), ("y", 1, "/somewhere/else")]
    with (tmp_path / "runs.jsonl").open("w") as file:
        for arm, side, directory in places:
            print(json.dumps({**line, "arm": arm, "side": side, "directory": directory}), file=file)
    found = read_records(tmp_path)
    assert (len(found.lines), found.malformed, len(found.done(plan))) == (2, 1, 1)


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"matched": 1}', "nonsense", json.dumps({"matched": "x", "arm": "a", "side": 2})]
)
def test_foreign_lines_are_counted_and_skipped(tmp_path: Path, line: str) -> None:
    plan = plan_of(pairs=1)
    conduct(plan, tmp_path)
    with (tmp_path / RUNS_FILE).open("a") as file:
        file.write(line + "\n")
    records = read_records(tmp_path)
    assert len(records.done(plan)) == 1
    assert len(records.lines) == 4


STAGES = ("done", "load", "start", "prepare", "well")


@settings(max_examples=40, deadline=None)
@given(
    heads=st.integers(1, 2),
    loads=st.integers(1, 2),
    pairs=st.integers(1, 3),
    aa_pairs=st.integers(0, 1),
    swap=st.booleans(),
    failing=st.sampled_from([0.0, 0.1, 0.6]),
    kills=st.lists(st.integers(1, 12), max_size=4),
    torn=st.integers(0, 400),
    deadline_s=st.none() | st.integers(0, 300),
    cool_down_s=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 1000),
)
def test_whatever_happens_pairs_are_complete_and_none_is_lost(
    heads: int,
    loads: int,
    pairs: int,
    aa_pairs: int,
    swap: bool,
    failing: float,
    kills: list[int],
    torn: int,
    deadline_s: int | None,
    cool_down_s: float,
    seed: int,
) -> None:
    """Arms fail, the conductor is killed, its last write is torn, and it goes on, as often as it takes."""
    plan = plan_of(
        heads, loads, pairs=pairs, aa_pairs=aa_pairs, swap=swap, seed=seed, cool_down_s=cool_down_s,
        deadline_s=deadline_s,
    )  # fmt: skip
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        for kill_at in [*kills, 0]:
            before = {one.pair.key for one in read_records(out).done(plan)}
            left = [kill_at]

            def what(matched: MatchedRun, arm: str, count: int, left: list[int] = left) -> str:
                left[0] -= 1
                if left[0] == 0:
                    return "kill"
                return draw.choice(STAGES) if draw.random() < failing else "done"

            clock = VirtualClock()
            script = Script(out, clock, what, {"load-0": draw.uniform(1, 40), "load-1": draw.uniform(1, 40)})
            started: list[tuple[str, int]] = []

            def told(progress: Progress, clock: VirtualClock = clock, started: list[tuple[str, int]] = started) -> None:
                assert 0 <= progress.done <= progress.total == len(plan.schedule)
                if progress.event is Event.PAIR_STARTED:
                    started.append((progress.pair.key, clock.ns))

            with Journal(out) as journal:
                try:
                    ending = Conductor(plan, script, clock, journal, told).run()
                except KeyboardInterrupt:
                    ending = None
            records = read_records(out)
            done = {one.pair.key for one in records.done(plan)}
            assert before.isdisjoint(key for key, _ in started)
            assert before <= done
            order = [pair.key for pair in plan.schedule]
            assert [key for key, _ in started] == sorted((key for key, _ in started), key=order.index)
            assert deadline_s is None or all(at < deadline_s * 1e9 for _, at in started)
            if ending is not None:
                assert {key for key, _ in started} <= done
                assert done | {pair.key for pair in ending.left_out} == set(order)
                assert done.isdisjoint(pair.key for pair in ending.left_out)
                assert (ending.reason is EndReason.COMPLETE) == (not ending.left_out)
                break
            file = out / RUNS_FILE
            written = file.read_bytes()
            last = len(written.splitlines(keepends=True)[-1]) if written else 0
            file.write_bytes(written[: len(written) - min(torn, last)])
        directories = [one.directory for one in read_records(out).lines]
        assert len(directories) == len(set(directories))
