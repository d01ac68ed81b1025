"""Somebody's command line as a recipe: `recipe_from_command(["vllm", "serve", MODEL])`, run exactly as it was typed.

What a recipe file would say is read off the command: its port (`{port}` anywhere in it is filled with a free one;
`--port N` and `-p N` are believed; otherwise `recipes/listening.py` finds it among the sockets of its processes), whose
metrics it will have, and what its processes are called.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from atom.recipes.errors import UsageError
from atom.recipes.known_servers import KNOWN_ROLES, METRICS_PATHS
from atom.recipes.recipe import Health, Listens, Metrics, MetricsDialect, Recipe, Stop

__all__ = ["command_dialect", "recipe_from_command"]

_READY_TIMEOUT_S: Final = 1800.0
"""A large model takes its time, and the command may download it first."""
_GRACE_S: Final = 60.0
_OWN_PORT: Final = re.compile(r"(\{\{port\}\})|\{port\}")
"""A template's `{{port}}` is the command's own."""
_ELSEWHERE: Final = frozenset({"docker", "podman", "nerdctl", "ssh", "srun", "kubectl", "enroot"})
_CONTAINERS: Final = frozenset({"docker", "podman", "nerdctl"})
_PROGRAMS: Final[tuple[tuple[re.Pattern[str], MetricsDialect], ...]] = (
    (re.compile(r"(?:^|[ /])vllm serve(?: |$)|(?:^| )vllm\.|/vllm(?:-openai)?:"), "vllm"),
    (re.compile(r"(?:^| )sglang\.|(?:^|[ /])sglang serve(?: |$)|/sglang:"), "sglang"),
    (re.compile(r"(?:^|[ /])trtllm-serve(?: |$)|(?:^| )tensorrt_llm\.|/tensorrt-llm/"), "trtllm"),
    (re.compile(r"(?:^|[ /])atom serve(?: |$)|(?:^| )atom\.(?:engine|entrypoints)\."), "atom"),
)


def recipe_from_command(argv: Sequence[str], *, base_url: str | None = None) -> Recipe:
    """A recipe that runs `argv` unchanged. `base_url` says where the server will be, when that cannot be seen from
    here (a container, another machine); UsageError if it is no plain http URL or the command is empty."""
    if not argv or not argv[0]:
        raise UsageError("there is no command after `--`; give one, such as `-- vllm serve MODEL`")
    dialect = command_dialect(argv)
    return Recipe(
        name=_name(argv),
        source="command line",
        command=tuple(_escape(word) for word in argv),
        listens=_listens(argv) if base_url is None else _listens_at(base_url),
        devices_env=("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
        health=Health(status=None),
        ready_timeout_s=_READY_TIMEOUT_S,
        stop=Stop(grace_s=_GRACE_S),
        metrics=Metrics(dialect=dialect, path=METRICS_PATHS[dialect][0]),
        roles=KNOWN_ROLES,
    )


def command_dialect(argv: Sequence[str]) -> MetricsDialect:
    """Whose server a command starts; "auto" for one that is not known."""
    text = " ".join(argv)
    return next((dialect for pattern, dialect in _PROGRAMS if pattern.search(text)), "auto")


def _name(argv: Sequence[str]) -> str:
    """The program and what it is told to run, without options: they may hold secrets."""
    words = [Path(argv[0]).name]
    rest = iter(argv[1:])
    for word in rest:
        if word == "-m":
            words += ["-m", next(rest, "")]
            break
        if word == "-c":
            break  # a script, of whatever length
        if not word.startswith("-"):
            words.append(Path(word).name)
            break
    return " ".join(words)[:60]


def _escape(word: str) -> str:
    """Braces are the command's own (JSON, templates), except `{port}`."""
    pieces, at = [], 0
    for match in _OWN_PORT.finditer(word):
        if match[1] is None:
            pieces.append(word[at : match.start()])
            at = match.end()
    return "{port}".join(piece.replace("{", "{{").replace("}", "}}") for piece in [*pieces, word[at:]])


def _wants_port(word: str) -> bool:
    return any(match[1] is None for match in _OWN_PORT.finditer(word))


def _listens(argv: Sequence[str]) -> Listens:
    elsewhere = Path(argv[0]).name in _ELSEWHERE
    if any(map(_wants_port, argv)):
        return Listens(host=_host(argv), elsewhere=elsewhere)
    values = _values(argv, ("--port", "-p"))
    if Path(argv[0]).name in _CONTAINERS:
        values += [published.split(":")[-2] for published in _values(argv, ("-p", "--publish")) if ":" in published]
    ports = [int(value) for value in values if value.isascii() and value.isdigit() and 0 < int(value[:6]) < 65536]
    if not ports and elsewhere:
        raise UsageError(
            f"{argv[0]}: where its server listens cannot be seen from here; give --base-url http://HOST:PORT"
        )
    return Listens(port=ports[-1] if ports else None, host=_host(argv), elsewhere=elsewhere)


def _host(argv: Sequence[str]) -> str | None:
    given = [value for value in _values(argv, ("--host",)) if value not in ("", "0.0.0.0", "::")]
    return given[-1] if given and Path(argv[0]).name not in _ELSEWHERE else None


def _values(argv: Sequence[str], flags: Sequence[str]) -> list[str]:
    """What the command gives for any of these flags, in its order."""
    found = [value for flag, value in pairwise(argv) if flag in flags]
    return found + [word.partition("=")[2] for word in argv if word.partition("=")[0] in flags and "=" in word]


def _listens_at(base_url: str) -> Listens:
    parts = urlsplit(base_url)
    try:
        port = parts.port or 80
    except ValueError:
        port = 0
    if parts.scheme != "http" or not parts.hostname or not port or parts.path not in ("", "/"):
        raise UsageError(f"--base-url of a command must look like http://HOST:PORT, got {base_url!r}")
    return Listens(port=port, host=parts.hostname, elsewhere=True)
