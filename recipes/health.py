"""Is a server ready? One GET on a connection of its own, bounded in time and bytes."""

from __future__ import annotations

import http.client
from typing import Final

__all__ = ["probe_health"]

_TIMEOUT_S: Final = 5.0
_MAX_BYTES: Final = 64 * 1024


def probe_health(host: str, port: int, path: str, status: int) -> str | None:
    """None if GET `path` answers `status`; otherwise what is being waited for, in words."""
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    wanted = f"http://{address}:{port}{path} to answer {status}"
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
    return None if response.status == status else f"{wanted} (it answers {response.status})"
