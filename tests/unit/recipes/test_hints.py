"""What a dead server's last lines are taken to mean."""

from __future__ import annotations

import signal

import pytest

from atom.recipes.hints import address_in_use, describe_status, failure_hint


@pytest.mark.parametrize(
    ("status", "lines", "expected"),
    [
        (1, ["ModuleNotFoundError: No module named 'torch.foo'"], "module torch.foo is missing"),
        (1, ["OSError: [Errno 98] error while attempting to bind: address already in use"], "port is taken"),
        (1, ["torch.cuda.OutOfMemoryError: CUDA out of memory."], "ran out of memory"),
        (2, ["api_server.py: error: unrecognized arguments: --warp"], "does not know --warp"),
        (1, ["OSError: [Errno 28] No space left on device"], "disk is full"),
        (
            1,
            ["ERROR the engine died: EngineCore 3 (pid 71) was killed by SIGKILL", "bye"],
            "EngineCore 3 (pid 71) was killed",
        ),
        (1, ["ERROR: Engine core proc EngineCore_DP0 died unexpectedly, shutting down client."], "died unexpectedly"),
        (-9, ["loading weights"], "something killed it"),
        (137, [], "something killed it"),
        (-signal.SIGILL, [], "instruction"),
        (1, ["nothing that is known"], None),
        (0, [], None),
    ],
)
def test_hints(status: int, lines: list[str], expected: str | None) -> None:
    hint = failure_hint(status, lines)
    assert hint == expected if expected is None else expected in (hint or "")


def test_the_last_telling_line_decides() -> None:
    assert "port" in (failure_hint(1, ["CUDA out of memory", "address already in use"]) or "")


def test_statuses_in_words() -> None:
    assert describe_status(3) == "exit status 3"
    assert describe_status(-15) == "signal SIGTERM"
    assert describe_status(-200) == "signal 200"
    assert describe_status(None) == "an unknown status"
    assert address_in_use(["x", "OSError: [Errno 98] Address already in use"])
    assert not address_in_use(["fine"])
