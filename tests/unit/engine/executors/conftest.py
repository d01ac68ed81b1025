"""Steps for executors' tests: sequences with made-up states and batches without a scheduler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from atom.engine.kernels.bindings import CPUKernels, KernelsUnavailableError


@pytest.fixture(scope="module")
def kernels() -> Iterator[CPUKernels]:
    """The compiled kernels on three threads, more than some machines have cores; skips where nothing compiles."""
    try:
        compiled = CPUKernels(3)
    except KernelsUnavailableError as error:
        pytest.skip(str(error))
    yield compiled
    compiled.close()
