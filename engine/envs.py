"""Every `ATOM_*` environment variable that engine code reads: name, default, meaning, and how its text is read.

Adding one is adding a `Variable` here and its row in docs/environment_variables.md (a test compares them, and both with
what the code names). Whatever an operator would want to see in a recorded command line is a flag instead
(`engine/server/args.py`); what is here must reach processes that have no command line of their own, or is a secret.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar, get_args

from atom.engine.errors import ConfigError

T = TypeVar("T")

KernelChoice = Literal["auto", "attention", "torch"]
Fault = Literal["retain-finished"]


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One variable. Unset and empty are the same."""

    name: str
    default: T
    shown_default: str
    """As the documentation's table has it."""
    meaning: str
    parse: Callable[[str], T]
    """Raises `ValueError` whose message says what would be right."""

    def read(self, environ: Mapping[str, str] = os.environ) -> T:
        """The value now. Raises `ConfigError` naming the variable."""
        text = environ.get(self.name)
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as wrong:
            raise ConfigError(f"{self.name} {wrong}, got {text!r}") from None


def _parse_switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("must be 1 (on) or 0 (off)")
    return text == "1"


def _parse_kernels(text: str) -> KernelChoice:
    for choice in get_args(KernelChoice):
        if text == choice:
            kernels: KernelChoice = choice
            return kernels
    raise ValueError("must be auto, attention or torch")


def _parse_faults(text: str) -> frozenset[Fault]:
    known: tuple[Fault, ...] = get_args(Fault)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if any(name not in known for name in names):
        raise ValueError(f"must be a comma-separated list out of: {', '.join(known)}")
    return frozenset(fault for fault in known if fault in names)


API_KEY: Final = Variable[str | None](
    "ATOM_API_KEY", None, "none",
    "Key that opens `/v1`, and that the tools send. `--api-key` wins. "
    "Unlike the flag, it is not visible to other users in `ps`.",
    str,
)  # fmt: skip
CPU_KERNELS: Final = Variable[KernelChoice](
    "ATOM_CPU_KERNELS", "auto", "`auto`",
    "Kernels of the CPU executor: `auto` the fastest, `attention` compiled attention alone, `torch` none.",
    _parse_kernels,
)  # fmt: skip
ENGINE_CONFIG: Final = Variable[str | None](
    "ATOM_ENGINE_CONFIG", None, "set by the engine",
    "The engine's configuration as JSON, from the API process to the cores that it starts and from a core to its "
    "workers. Not for users.",
    str,
)  # fmt: skip
FAULTS: Final = Variable[frozenset[Fault]](
    "ATOM_FAULTS", frozenset(), "none",
    "Faults to put into the server on purpose, comma-separated, so that tools can be tried on them. "
    "`retain-finished`: finished sequences are queued although nobody reads the queue.",
    _parse_faults,
)  # fmt: skip
METRICS_PER_REQUEST_CONTEXT: Final = Variable[bool](
    "ATOM_METRICS_PER_REQUEST_CONTEXT", False, "`0`",
    "`1`: the gauges `atom:prefill_request_context_tokens` and `atom:decode_request_context_tokens`, one series per "
    "request. They are never removed, so memory and the time of a scrape grow with every request: not for production.",
    _parse_switch,
)  # fmt: skip
METRICS_DEVICE_TIMER: Final = Variable[bool](
    "ATOM_ENABLE_METRICS_DEVICE_TIMER", False, "`0`",
    "`1`: the histograms `atom:device_forward_seconds` and `atom:device_sample_seconds`, per step.",
    _parse_switch,
)  # fmt: skip

VARIABLES: Final[tuple[Variable[object], ...]] = (  # type: ignore[assignment]
    API_KEY, CPU_KERNELS, ENGINE_CONFIG, METRICS_DEVICE_TIMER, FAULTS, METRICS_PER_REQUEST_CONTEXT,
)  # fmt: skip


def check_environment() -> None:
    """Raise the `ConfigError` of the first variable that is set to what it cannot be."""
    for variable in VARIABLES:
        variable.read()
