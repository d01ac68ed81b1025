"""Ports: finding a free one, refusing a taken one before a server starts, reading the one a server chose itself."""

from __future__ import annotations

import errno
import json
import socket
from pathlib import Path

from atom.recipes.errors import UsageError
from atom.recipes.processes import command_line, listening_processes

__all__ = ["free_port", "read_port_file", "refuse_taken_port"]


def free_port(host: str) -> int:
    """A port nobody listens on now. Another process may take it before the server does: the launcher then retries."""
    with socket.socket(_family(host)) as probe:
        try:
            probe.bind((host, 0))
        except (OSError, UnicodeError) as error:
            raise _wrong_host(host, error) from None
        port: int = probe.getsockname()[1]
        return port


def refuse_taken_port(host: str, port: int) -> None:
    """Raise UsageError if the port cannot be listened on, naming who has it where that is visible."""
    with socket.socket(_family(host)) as probe:
        # As servers do: a port whose last connections are in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except UnicodeError as error:
            raise _wrong_host(host, error) from None
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise _wrong_host(host, error) from None
            holders = listening_processes(port) or []
            who = f" by pid {holders[0]} ({command_line(holders[0])[:80]})" if holders else ""
            taken = (
                f"is already in use{who}" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
            )
            raise UsageError(f"--port {port} {taken}; choose another, or --port 0 for a free one") from None


def _wrong_host(host: str, error: OSError | UnicodeError) -> UsageError:
    reason = error.strerror if isinstance(error, OSError) else "not a host name"
    return UsageError(f"--host {host}: cannot listen there: {reason}")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def read_port_file(path: Path) -> int | None:
    """The port a server wrote (a number, or JSON with `port`); None while the file is not complete."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    port = value.get("port") if isinstance(value, dict) else value
    return port if isinstance(port, int) and 0 < port < 65536 else None
