"""The queue that the collector's callbacks fill: whole passes come out, whatever fell out of it."""

from __future__ import annotations

import itertools
import types
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from atom.diag.gc_hook.passes import PassQueue


def call(queue: PassQueue, phase: str, generation: int = 2) -> None:
    """As the collector does."""
    info = {"generation": generation, "collected": 0, "uncollectable": 0}
    for callback in queue.callbacks:
        callback(phase, info)


def collect(queue: PassQueue, generation: int) -> None:
    call(queue, "start", generation)
    call(queue, "stop", generation)


def test_a_pass_that_began_before_the_hook_came_is_left_out() -> None:
    queue = PassQueue()
    call(queue, "stop")
    collect(queue, 1)
    call(queue, "start")
    assert [info["generation"] for *_, info in queue.take()] == [1]
    assert not queue.take()
    call(queue, "stop")
    assert len(queue.take()) == 1
    assert queue.lost == 0


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=12), st.integers(1, 5))
def test_every_pass_is_taken_whole_or_counted_as_lost(bursts: list[tuple[int, bool]], capacity: int) -> None:
    queue = PassQueue(capacity)
    begun, taken = 0, []
    for passes, half in bursts:
        for _ in range(passes):
            collect(queue, begun % 3)
            begun += 1
        if half:
            call(queue, "start", begun % 3)
        taken += queue.take()
        if half:
            call(queue, "stop", begun % 3)
            begun += 1
    collect(queue, begun % 3)
    taken += queue.take()
    assert len(taken) + queue.lost == begun + 1
    assert all(start <= stop for start, stop, _, _ in taken)
    assert all(one[1] <= following[0] for one, following in itertools.pairwise(taken))


def test_no_python_code_runs_in_the_callbacks() -> None:
    """Not even as the setter of a property: CPython runs signal handlers when a Python function begins."""

    def parts(thing: Any) -> list[Any]:
        return [thing.func, *thing.args] if hasattr(thing, "func") else [thing]

    for callback in PassQueue().callbacks:
        setter, target = parts(callback)
        assert setter is setattr
        for phase in ("start", "stop"):
            assert isinstance(
                getattr(type(target), phase).fset, (types.BuiltinFunctionType, types.MethodDescriptorType)
            )
        for name in ("__next__", "__setattr__", "append", "extend"):
            assert not isinstance(getattr(type(target), name, None), types.FunctionType)
