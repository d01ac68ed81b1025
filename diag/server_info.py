"""What a running server says about itself: the model it serves and, where it tells, how it executes it."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from typing import Any, Final

from atom.diag.http_fetch import ScrapeError, fetch

__all__ = ["ServerInfo", "server_info"]

TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """None where the server does not say."""

    model: str | None
    max_model_len: int | None
    executor: str | None
    """`cpu`, `cuda`, `simulated`: only our engine tells, in /server_info."""
    data_parallel_size: int | None = None
    """Engines behind the one address; only our engine tells."""
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    raw: dict[str, Any] = field(default_factory=dict)


def server_info(base_url: str) -> ServerInfo:
    """Ask /v1/models and /server_info; never raises."""
    raw = {key: _get(base_url + path) for key, path in (("models", "/v1/models"), ("server_info", "/server_info"))}
    models = raw["models"].get("data")
    first: Any = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
    model, length = first.get("id"), first.get("max_model_len")
    return ServerInfo(
        model=model if isinstance(model, str) else None,
        max_model_len=_integer(length),
        executor=_executor(raw["server_info"]),
        data_parallel_size=_integer(raw["server_info"].get("data_parallel_size")),
        tensor_parallel_size=_integer(raw["server_info"].get("tensor_parallel_size")),
        pipeline_parallel_size=_integer(raw["server_info"].get("pipeline_parallel_size")),
        raw={key: value for key, value in raw.items() if value},
    )


def _executor(info: dict[str, Any]) -> str | None:
    if info.get("simulated") is True:
        return "simulated"
    engine = info.get("engine")
    executor = engine.get("executor") if isinstance(engine, dict) else None
    return executor if isinstance(executor, str) else None


def _integer(value: Any) -> int | None:
    return value if type(value) is int else None


def _get(url: str) -> dict[str, Any]:
    with contextlib.suppress(ScrapeError, ValueError, RecursionError):
        response = fetch(url, timeout_s=TIMEOUT_S, max_bytes=1 << 20)
        value = json.loads(response.body) if response.status == 200 else None
        if isinstance(value, dict):
            return value
    return {}
