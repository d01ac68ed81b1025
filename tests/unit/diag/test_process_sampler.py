"""Sampling real processes: found by label, by supervisor, by listener; roles; the dead disappear."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

from atom.diag.process_sampler import ProcessSampler
from atom.recipes.processes import LABEL_VARIABLE
from atom.recipes.recipe import Roles

SLEEP = "import sys,time; print('up', flush=True); time.sleep(600)"


def start(*words: str, label: str = "") -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEP, *words], env={**os.environ, LABEL_VARIABLE: label}, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    return process


def test_a_labelled_process_from_start_to_end() -> None:
    label = str(uuid.uuid4())
    one, two = start("the-api", label=label), start("the-worker", label=label)
    try:
        sampler = ProcessSampler(
            label=label, roots=[], listeners=[], roles=Roles(api=("the-api",), worker=("the-worker",))
        )
        lines = {line["pid"]: line for line in sampler.sample()}
        assert set(lines) == {one.pid, two.pid}
        line = lines[one.pid]
        assert (line["role"], lines[two.pid]["role"]) == ("api", "worker")
        assert line["rss_bytes"] > 1 << 20
        assert line["threads"] == 1
        assert line["fds"] >= 2
        assert line["cpu_s"] >= 0
        assert "the-api" in line["command"]
        assert all("command" not in again for again in sampler.sample())
        one.kill()
        one.wait()
        assert [line["pid"] for line in sampler.sample()] == [two.pid]
        assert list(sampler._labelled) != []
    finally:
        for process in (one, two):
            process.kill()
            process.wait()
    assert list(sampler.sample()) == []
    assert sampler._labelled == set()


def test_a_tree_counts_and_its_first_line_says_what_runs() -> None:
    process = start()
    try:
        sampler = ProcessSampler(label=None, roots=[], listeners=[], trees=[process.pid], roles=Roles())
        (line,) = sampler.sample()
        assert (line["pid"], line["role"]) == (process.pid, "other")
        assert Path(line["exe"]).name.startswith("python")
    finally:
        process.kill()
        process.wait()
    assert list(sampler.sample()) == []


def test_processes_that_come_and_go_never_stop_the_sampler() -> None:
    churn = "import subprocess, sys\nprint('up', flush=True)\nwhile True: subprocess.run(['true'])"
    process = subprocess.Popen([sys.executable, "-c", churn], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        sampler = ProcessSampler(label="none", roots=[], listeners=[], trees=[process.pid], roles=Roles(api=("true",)))
        for _ in range(50):
            assert process.pid in {line["pid"] for line in sampler.sample()}
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_listener_counts_with_its_descendants() -> None:
    process = start()
    try:
        sampler = ProcessSampler(label=None, roots=[], listeners=[process.pid], roles=Roles())
        assert [(line["pid"], line["role"]) for line in sampler.sample()] == [(process.pid, "api")]
        below = ProcessSampler(label=None, roots=[os.getpid()], listeners=[], roles=Roles())
        assert process.pid in {line["pid"] for line in below.sample()}
        assert os.getpid() not in {line["pid"] for line in below.sample()}
    finally:
        process.kill()
        process.wait()
