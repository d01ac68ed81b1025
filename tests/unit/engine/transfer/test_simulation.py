"""The agreement over a modelled network: what a packet costs is what was stated, and the protocol is the real one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atom.engine.errors import ConfigError
from atom.engine.probes import agreement_scale
from atom.engine.transfer.simulation import NetworkModel, Workload, simulate
from atom.engine.transfer.topology import Topology

FREE = NetworkModel(send_us=0, receive_us=0, poll_us=0, poll_interval_us=1e-3)


def test_a_commit_takes_one_way_to_the_coordinator_and_one_back() -> None:
    model = NetworkModel(latency_us=100, send_us=0, receive_us=0, poll_us=0, poll_interval_us=1e-3)
    result = simulate(Topology.flat(2), model, Workload(requests=50, spread_ms=1))
    longest, shortest = max(result.commit_ms), min(result.commit_ms)
    assert longest == pytest.approx(0.2, rel=0.01)  # the follower voted last
    assert shortest == pytest.approx(0.1, rel=0.01)  # the coordinator did: it decides at once


@pytest.mark.parametrize("topology", [Topology.flat(64), Topology.staged(8, 8)], ids=["flat", "staged"])
def test_every_edge_carries_one_vote_up_and_one_commit_down(topology: Topology) -> None:
    result = simulate(topology, NetworkModel(), Workload(requests=20, failures=0.01))
    assert result.messages_per_request == 2 * 63
    assert result.coordinator_messages_per_request == 2 * len(topology.children[topology.root])


def test_the_coordinators_time_is_what_its_packets_cost() -> None:
    model = NetworkModel(send_us=3, receive_us=7, poll_us=0)
    result = simulate(Topology.flat(16), model, Workload(requests=20))
    assert result.coordinator_us_per_request == pytest.approx(15 * (3 + 7))
    assert result.limit_requests_per_s == pytest.approx(1e6 / 150)
    assert result.coordinator_load == pytest.approx(100 / (1e6 / 150))


def test_a_coordinator_that_cannot_keep_up_lets_commits_wait_ever_longer() -> None:
    slow = NetworkModel(receive_us=500)
    result = simulate(Topology.flat(64), slow, Workload(requests=40))
    assert result.coordinator_load > 1
    assert result.commit_ms[-1] > 3 * result.commit_ms[0]
    staged = simulate(Topology.staged(8, 8), slow, Workload(requests=40))
    assert staged.coordinator_load < 1
    assert max(staged.commit_ms) < result.commit_ms[-1] / 3


def test_a_narrow_link_sends_one_packet_after_the_other() -> None:
    wide = simulate(Topology.flat(32), FREE, Workload(requests=5)).commit_ms
    narrow_model = NetworkModel(send_us=0, receive_us=0, poll_us=0, poll_interval_us=1e-3, bandwidth_gb_s=32e-6)
    narrow = simulate(Topology.flat(32), narrow_model, Workload(requests=5)).commit_ms
    assert min(narrow) >= 31.0  # 31 commits of 32 bytes at 32 bytes a millisecond
    assert max(wide) < 0.1


def test_a_link_that_takes_hours_leaves_packets_waiting_and_they_still_all_arrive() -> None:
    model = NetworkModel(bandwidth_gb_s=1e-9)
    assert simulate(Topology.flat(8), model, Workload(requests=600, failures=0.1)).messages_per_request == 14


def test_topologies_agree_on_the_outcomes_and_a_seed_repeats_itself() -> None:
    workload = Workload(requests=30, failures=0.02, seed=3)
    runs = [simulate(Topology.staged(4, 4), NetworkModel(), workload) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0].digest != simulate(Topology.staged(4, 4), NetworkModel(), Workload(requests=30, seed=3)).digest


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: NetworkModel(latency_us=-1), "latency_us must be at least 0, got -1"),
        (lambda: NetworkModel(poll_interval_us=0), "poll_interval_us must be positive, got 0"),
        (lambda: NetworkModel(send_us=float("nan")), "send_us must be at least 0, got nan"),
        (lambda: Workload(requests=0), "requests must be at least 1, got 0"),
        (lambda: Workload(requests_per_s=0), "requests_per_s must be positive, got 0"),
        (lambda: Workload(failures=2), "failures must be a fraction from 0 to 1, got 2"),
    ],
)
def test_costs_that_cannot_be(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_the_probe_says_what_is_stated_and_one_line_for_each_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert agreement_scale.main(["--ranks", "4,64", "--shards", "4", "--requests", "8", "--receive-us", "20"]) == 0
    stated, *rows = map(json.loads, capsys.readouterr().out.splitlines())
    assert (stated["simulated"], stated["receive_us"], stated["requests"]) == (True, 20, 8)
    assert [(row["ranks"], row["stages"], row["shards"]) for row in rows] == [
        *((4, None, None), (4, 2, 2)),
        *((64, None, None), (64, 16, 4), (64, 8, 8)),
    ]
    assert all(row["messages_per_request"] == 2 * (row["ranks"] - 1) for row in rows)


def test_the_probes_table_and_its_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert agreement_scale.main(["--ranks", "4", "--receive-us", "5000", "--markdown"]) == 0
    assert "grows without end |" in capsys.readouterr().out
    assert agreement_scale.main(["--ranks", "4,x"]) == 2
    assert "--ranks takes numbers from 2 to 65536" in capsys.readouterr().err
