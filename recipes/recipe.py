"""Recipes: what to run and how to start, watch and stop it, as frozen dataclasses.

Finding and reading them is `recipes/resolve.py`, checking the YAML `recipes/schema.py`, filling the placeholders
`recipes/placeholders.py`, starting `recipes/launcher.py`.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from atom.recipes.schema import FieldPath, RecipeDocument

__all__ = [
    "RESERVED_PLACEHOLDERS",
    "Health",
    "Listens",
    "Metrics",
    "MetricsDialect",
    "Recipe",
    "Requirement",
    "Roles",
    "SourceTree",
    "Stop",
    "Variable",
    "recipe_from_document",
]

MetricsDialect = Literal["auto", "atom", "vllm", "sglang", "trtllm"]
Argv = tuple[str, ...]

RESERVED_PLACEHOLDERS: Final = frozenset(
    {"src", "model", "port", "devices", "host", "python", "port_file", "label", "env", "scratch"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """A placeholder of the recipe's own. Value: `--set NAME=…`, else the environment variable, else the default."""

    default: str | None = None
    env: str | None = None
    help: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirement:
    """Modules the recipe's interpreter must find, checked before anything starts."""

    modules: tuple[str, ...]
    install: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """The server is ready when GET `path` on `port` answers `status`."""

    path: str = "/health"
    status: int | None = 200
    """None: anything but a server error; a server without such a path (404) is ready when it answers."""
    port: str = "port"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """`command`, if given, then `signal` to the server; SIGKILL to all that is left after `grace_s` seconds."""

    signal: int = signal.SIGTERM
    grace_s: float = 30.0
    command: Argv | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """Where the Prometheus text is and whose metric names it uses."""

    dialect: MetricsDialect = "auto"
    path: str = "/metrics"
    port: str = "port"


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """Regular expressions, searched in a process's command line or title. The most specific role that matches wins,
    because a forked worker can show its parent's command line."""

    api: tuple[str, ...] = ()
    core: tuple[str, ...] = ()
    worker: tuple[str, ...] = ()

    def role_of(self, command: str) -> str:
        """ "worker", "core", "api", or "other"."""
        for role, patterns in (("worker", self.worker), ("core", self.core), ("api", self.api)):
            if any(re.search(pattern, command) for pattern in patterns):
                return role
        return "other"

    def as_dict(self) -> dict[str, list[str]]:
        return {"worker": list(self.worker), "core": list(self.core), "api": list(self.api)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Sequence[str]]) -> Roles:
        return cls(**{name: tuple(patterns) for name, patterns in raw.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceTree:
    """How a checkout of the server's source is run (`source` in the file)."""

    path: str = "."
    """`{src}` within the checkout: what goes on PYTHONPATH."""
    packages: tuple[str, ...] = ()
    """Python packages, dotted, that must then come from the checkout, wherever else they are installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listens:
    """Where a command that is run unchanged listens."""

    port: int | None = None
    """Named in the command; None: found from the sockets of its processes."""
    host: str | None = None
    """Where to connect; None: from the socket's address, else 127.0.0.1."""
    elsewhere: bool = False
    """It may run in a container or on another machine: its sockets need not be those of its processes here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One way to start one kind of server. Strings may hold placeholders `{name}`; `{{` and `}}` are braces."""

    name: str
    command: Argv
    source: str
    """The file it came from."""
    description: str = ""
    model: str | None = None
    variables: Mapping[str, Variable] = field(default_factory=dict)
    requires: Requirement | None = None
    prepare: tuple[Argv, ...] = ()
    exec: Argv = ()
    """Prefix such as `docker exec NAME`: the server is then no child of this machine's launcher."""
    cwd: str | None = None
    env: Mapping[str, str | None] = field(default_factory=dict)
    """None removes the variable."""
    detached: bool = False
    devices_env: tuple[str, ...] = ()
    ports: Mapping[str, int | None] = field(default_factory=dict)
    health: Health = field(default_factory=Health)
    ready_timeout_s: float = 600.0
    log_max_bytes: int = 256 << 20
    stop: Stop = field(default_factory=Stop)
    metrics: Metrics = field(default_factory=Metrics)
    roles: Roles = field(default_factory=Roles)
    source_tree: SourceTree = field(default_factory=SourceTree)
    disaggregated: bool = False
    """It has a `context` or `generation` part; the launcher refuses those."""
    listens: Listens | None = None
    """For a command that is run as it is: where it listens is up to the command."""

    @property
    def title(self) -> str:
        """What to call it in a message."""
        return f"recipe {self.name}" if self.listens is None else f"command `{self.name}`"


def recipe_from_document(document: RecipeDocument) -> Recipe:
    """The dataclass of a document that fits the schema; UsageError for what a schema cannot say."""
    raw = document.data
    detached = bool(raw.get("detached", False))
    stop = raw.get("stop", {})
    if detached and "command" not in stop:
        raise document.error(("detached",), "needs `stop.command`: nothing else can stop a detached server")
    requires = raw.get("requires")
    return Recipe(
        name=raw["name"],
        source=document.source,
        description=raw.get("description", ""),
        model=raw.get("model"),
        variables=_variables(document),
        requires=None
        if requires is None
        else Requirement(modules=tuple(requires["modules"]), install=requires.get("install")),
        prepare=tuple(_argv(document, ("prepare", index), value) for index, value in enumerate(raw.get("prepare", []))),
        command=_argv(document, ("command",), raw["command"]),
        exec=_argv(document, ("exec",), raw["exec"]) if "exec" in raw else (),
        cwd=raw.get("cwd"),
        env={name: None if value is None else str(value) for name, value in raw.get("env", {}).items()},
        detached=detached,
        devices_env=tuple(raw.get("devices", {}).get("env", ())),
        ports=_ports(document),
        health=_health(document),
        ready_timeout_s=float(raw.get("ready_timeout", 600.0)),
        log_max_bytes=int(raw.get("logs", {}).get("max_bytes", 256 << 20)),
        stop=Stop(
            signal=signal.Signals[stop.get("signal", "SIGTERM")],
            grace_s=float(stop.get("grace", 30.0)),
            command=_argv(document, ("stop", "command"), stop["command"]) if "command" in stop else None,
        ),
        metrics=_metrics(document),
        roles=_roles(document),
        source_tree=_source_tree(document),
        disaggregated="context" in raw or "generation" in raw,
    )


def _argv(document: RecipeDocument, path: FieldPath, value: str | list[str | int | float]) -> Argv:
    if isinstance(value, str):
        try:
            words = shlex.split(value)
        except ValueError as error:
            raise document.error(path, f"cannot be split into arguments: {error}") from None
        if not words:
            raise document.error(path, "is empty; it must name a program")
        return tuple(words)
    return tuple(str(word) for word in value)


def _variables(document: RecipeDocument) -> dict[str, Variable]:
    variables = {}
    for name, value in document.data.get("variables", {}).items():
        if name in RESERVED_PLACEHOLDERS - {"python"}:
            raise document.error(("variables", name), "is a placeholder of every recipe; call it something else")
        variables[name] = Variable(default=value) if isinstance(value, str) else Variable(**value)
    return variables


def _ports(document: RecipeDocument) -> dict[str, int | None]:
    ports: dict[str, int | None] = document.data.get("ports", {})
    for name in ports:
        if name in RESERVED_PLACEHOLDERS or name in document.data.get("variables", {}):
            raise document.error(("ports", name), "is the name of another placeholder; call it something else")
    return dict(ports)


def _source_tree(document: RecipeDocument) -> SourceTree:
    raw = document.data.get("source", {})
    path: str = raw.get("path", ".")
    if path.startswith("/") or ".." in path.split("/"):
        raise document.error(("source", "path"), f"is {path!r}; it must be a directory inside the checkout")
    return SourceTree(path=path, packages=tuple(raw.get("packages", ())))


def _port_name(document: RecipeDocument, section: str) -> str:
    name: str = document.data.get(section, {}).get("port", "port")
    if name != "port" and name not in document.data.get("ports", {}):
        raise document.error((section, "port"), f"is {name!r}; it must be 'port' or a name from `ports`")
    return name


def _health(document: RecipeDocument) -> Health:
    raw = document.data.get("health", {})
    return Health(path=raw.get("path", "/health"), status=raw.get("status", 200), port=_port_name(document, "health"))


def _metrics(document: RecipeDocument) -> Metrics:
    raw = document.data.get("metrics", {})
    return Metrics(
        dialect=raw.get("dialect", "auto"), path=raw.get("path", "/metrics"), port=_port_name(document, "metrics")
    )


def _roles(document: RecipeDocument) -> Roles:
    raw: dict[str, Any] = document.data.get("roles", {})
    for role, patterns in raw.items():
        for index, pattern in enumerate(patterns):
            try:
                re.compile(pattern)
            except re.error as error:
                message = f"is no regular expression: {error}"
                raise document.error(("roles", role, index), message) from None
    return Roles.from_dict(raw)
