"""Is a server ready? One GET on a connection of its own, bounded in time and bytes."""

from __future__ import annotations

import http.client
from typing import Final

__all__ = ["probe_health"]

_TIMEOUT_S: Final = 5.0
_MAX_BYTES: Final = 64 * 1024
_NOT_READY: Final = (500, 502, 503, 504)


def probe_health(host: str, port: int, path: str, status: int | None) -> str | None:
    """None if GET `path` answers `status` (None: anything but 500, 502, 503, 504); otherwise what is being waited for,
    in words."""
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    wanted = f"http://{f'[{address}]' if ':' in address else address}:{port}{path} to answer"
    wanted += "" if status is None else f" {status}"
    connection = http.client.HTTPConnection(address, port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", path, headers={"Connection": "close"})
        response = connection.getresponse()
        response.read(_MAX_BYTES)
    except TimeoutError:
        return f"{wanted} (no answer within {_TIMEOUT_S:g} s)"
    except ConnectionRefusedError:
        return f"{wanted} (nothing listens there yet)"
    except (OSError, http.client.HTTPException) as error:
        return f"{wanted} ({type(error).__name__})"
    finally:
        connection.close()
    fits = response.status not in _NOT_READY if status is None else response.status == status
    return None if fits else f"{wanted} (it answers {response.status})"
