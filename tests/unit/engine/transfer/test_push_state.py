"""Pushes and receptions against senders, receivers and copies that behave in any way a real one may."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from atom.engine.transfer.data_messages import Ended, Message, Revoke, ended
from atom.engine.transfer.data_path import Progress
from atom.engine.transfer.outcome import Outcome, Round
from atom.engine.transfer.push_state import Plan, Push
from atom.engine.transfer.reception import Reception

ROUND = Round(7, 3)
PLAN = Plan(1, [], (0,), (0,), ended(ROUND, Outcome.COMPLETED))


class FakeJob:
    def __init__(self, link: FakeLink) -> None:
        self.link = link
        self.complete = self.quiescent = self.stopped = False
        self.error: str | None = None

    def advance(self) -> None: ...

    def stop(self) -> None:
        self.stopped = True

    def finish(self) -> None:
        """The last byte is there, unless it was stopped before."""
        if not self.quiescent and not self.stopped and self.error is None:
            self.link.send(PLAN.completion)
            self.complete = True
        self.quiescent = True

    def fail(self) -> None:
        if not self.quiescent:
            self.error = "broken"


class FakeLink:
    def __init__(self, name: str = "peer") -> None:
        self.name = name
        self.ready = False
        self.lost: str | None = None
        self.silent = False
        self.sent: list[Message] = []
        self.job: FakeJob | None = None

    def send(self, message: Message) -> None:
        assert self.lost is None
        self.sent.append(message)

    def start(self, plan: Plan) -> FakeJob:
        assert self.ready
        assert self.job is None, "started twice"
        self.job = FakeJob(self)
        return self.job


STEPS = st.lists(
    st.sampled_from(["poll", "ready", "finish", "fail", "settle", "cancel", "revoke", "lose", "late"]), max_size=25
)


@given(STEPS)
def test_a_push_ends_once_and_is_quiescent_only_when_its_copy_is(steps: Sequence[str]) -> None:
    link = FakeLink()
    now = 0.0
    push = Push(ROUND, link, PLAN, deadline_s=10, now_s=now, poll=lambda: None)
    seen = None
    for step in steps:
        before = push.state
        if step == "ready":
            link.ready = True
        elif step == "finish" and link.job:
            link.job.finish() if link.lost is None else link.job.stop()
        elif step == "fail" and link.job:
            link.job.fail()
        elif step == "settle" and link.job and (link.job.stopped or link.job.error):
            link.job.quiescent = True
        elif step == "cancel":
            accepted = push.cancel()
            assert not (accepted and before.progress is not Progress.IN_FLIGHT)
        elif step == "revoke":
            push.stop(Outcome.CANCELLED, "revoked")
        elif step == "lose":
            link.lost = link.lost or "gone"
        elif step == "late":
            now += 6
        if step == "poll":
            push.advance(now)
        if seen is not None:
            assert push.state == seen, "an end changed"
        if push.state.progress is not Progress.IN_FLIGHT:
            seen = push.state
            assert (push.state.outcome is Outcome.COMPLETED) == (push.state.progress is Progress.DONE)
        if push.quiescent:
            assert push.state.progress is not Progress.IN_FLIGHT
            assert link.job is None or link.job.quiescent
    _wind_up(push, link, now)
    complete = link.job is not None and link.job.complete
    assert complete == (push.state.outcome is Outcome.COMPLETED)
    said = [message.outcome for message in link.sent if isinstance(message, Ended)]
    assert said == [push.state.outcome] or (said == [] and link.lost is not None and not complete)


def _wind_up(push: Push, link: FakeLink, now: float) -> None:
    """After the deadline, with a copy that stops when told to, nothing stays open."""
    push.advance(now + 100)
    if link.job is not None and not link.job.quiescent:
        assert link.job.stopped or link.job.error
        assert push.state.progress is Progress.FAILED, "a deadline was not kept"
        assert not push.quiescent
        link.job.quiescent = True
    push.advance(now + 100)
    assert push.quiescent


def test_a_copy_that_does_not_stop_has_failed_and_is_not_quiescent() -> None:
    link = FakeLink()
    link.ready = True
    push = Push(ROUND, link, PLAN, deadline_s=10, now_s=0, poll=lambda: None)
    push.advance(1)
    assert push.cancel()
    assert push.cancel(), "it may be asked for again"
    push.advance(2)
    assert push.state.progress is Progress.IN_FLIGHT
    push.advance(11)
    assert (push.state.progress, push.state.outcome, push.quiescent) == (Progress.FAILED, Outcome.CANCELLED, False)
    assert link.sent == []
    assert link.job is not None
    link.job.quiescent = True
    push.advance(12)
    assert push.quiescent
    assert link.sent == [ended(ROUND, Outcome.CANCELLED, "cancelled")]


SOURCES = ("a", "b", "c")
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["poll", "let in", "completed", "failed", "cancelled", "lose", "die", "cancel", "late"]),
        st.sampled_from(SOURCES),
    ),
    max_size=30,
)


@given(EVENTS)
def test_a_reception_is_quiescent_only_when_every_sender_is(events: Sequence[tuple[str, str]]) -> None:
    links: dict[str, FakeLink] = {}
    forbidden: list[Sequence[int]] = []
    now = 0.0
    reception = Reception(
        ROUND, (4, 5), links, SOURCES, deadline_s=10, now_s=now, poll=lambda: None, forbid=forbidden.append
    )
    may_write: set[str] = set()
    said: dict[str, Outcome] = {}
    seen = None
    for event, source in events:
        link = links.get(source)
        if event == "let in" and link is None:
            links[source] = FakeLink(source)
            if not forbidden:
                may_write.add(source)  # begins at once
        elif event in ("completed", "failed", "cancelled") and link is not None and link.lost is None:
            if source not in may_write and event == "completed":
                continue  # without marks nothing can be completed
            outcome = Outcome[event.upper()]
            if reception.source_ended(source, outcome, event):
                said.setdefault(source, outcome)
            may_write.discard(source)
        elif event in ("lose", "die") and link is not None:
            link.lost = link.lost or "gone"
            if event == "die":
                link.silent = True
                may_write.discard(source)
        elif event == "cancel":
            reception.cancel()
        elif event == "late":
            now += 6
        elif event == "poll":
            reception.advance(now)
        assert not (reception.quiescent and may_write), "blocks were given back that may be written"
        if seen is not None:
            assert reception.state == seen, "an end changed"
        if reception.state.progress is not Progress.IN_FLIGHT:
            seen = reception.state
            assert forbidden, "ended, and blocks could still be written by who comes late"
        if reception.state.progress is Progress.DONE:
            assert said == dict.fromkeys(SOURCES, Outcome.COMPLETED)
    reception.advance(now + 100)
    assert reception.state.progress is not Progress.IN_FLIGHT, "a deadline was not kept"
    for link in links.values():
        assert link.sent.count(Revoke(*ROUND)) <= 1


def test_a_failed_part_stops_the_other_senders() -> None:
    links = {name: FakeLink(name) for name in SOURCES}
    reception = Reception(ROUND, (1,), links, SOURCES, deadline_s=10, now_s=0, poll=lambda: None, forbid=lambda _: None)
    assert reception.source_ended("a", Outcome.FAILED, "disk")
    assert not reception.source_ended("a", Outcome.COMPLETED, ""), "a vote cannot be changed"
    assert not reception.source_ended("z", Outcome.COMPLETED, ""), "not one of its senders"
    assert links["b"].sent == links["c"].sent == [Revoke(*ROUND)]
    reception.source_ended("b", Outcome.CANCELLED, "revoked")
    reception.advance(1)
    assert reception.state.progress is Progress.IN_FLIGHT
    reception.source_ended("c", Outcome.COMPLETED, "")
    reception.advance(1)
    assert reception.quiescent
    assert (reception.state.outcome, reception.state.reason) == (Outcome.CANCELLED, "disk")
