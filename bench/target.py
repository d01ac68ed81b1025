"""What a server says about itself before it is loaded: its model, its context length, its vocabulary, its executor."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from atom.recipes.errors import RunError, UsageError

if TYPE_CHECKING:
    import httpx

__all__ = ["Target", "ask_server"]


_SPECULATIVE: Final = re.compile(r"speculative_(?:config|algorithm)['\"]?\s*[=:]\s*[^\n]{0,500}")


@dataclass(frozen=True, slots=True)
class Target:
    """None where the server does not say."""

    base_url: str
    model: str
    max_model_len: int | None = None
    vocab_size: int | None = None
    executor: str | None = None
    """`cpu`, `cuda` or `simulated`; our engine says it in /server_info."""
    engine: str | None = None
    """Its owner in /v1/models and its /version."""
    speculation: str | None = None
    """Settings of speculative decoding in /server_info, as the server writes them; None where it has none of them."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def ask_server(
    base_url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    headers: Mapping[str, str] | None = None,
    verify_tls: bool = True,
    timeout: float = 10.0,
) -> Target:
    """Ask /v1/models, /server_info and /version. `model`: use this name instead of the first one served.

    RunError if nobody answers; UsageError if the server wants a key, or says no model and `model` is None.
    """
    import httpx  # a fifth of a second, which commands that ask no server need not pay

    sent = dict(headers or {})
    if api_key is not None:
        sent.setdefault("Authorization", f"Bearer {api_key}")
    # No proxies from the environment: they would stand between the load and its server.
    with httpx.Client(base_url=base_url, headers=sent, verify=verify_tls, timeout=timeout, trust_env=False) as client:
        try:
            response = client.get("/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RunError(
                f"no server answers at {base_url}: {error}; start one (atom serve), name another with --base-url, "
                "or let a recipe start it (--recipe embedded)"
            ) from None
        if response.status_code in (401, 403):
            raise UsageError(f"{base_url} wants a key (HTTP {response.status_code}): pass --api-key or OPENAI_API_KEY")
        served = _first_model(_json(response), model)
        name = model or served.get("id")
        if not isinstance(name, str):
            raise UsageError(f"{base_url}/v1/models names no model (HTTP {response.status_code}): pass --model")
        info, version = _get(client, "/server_info"), _get(client, "/version")
    return Target(
        base_url=base_url,
        model=name,
        max_model_len=_find(served, "max_model_len", int) or _find(info, "max_model_len", int),
        vocab_size=_find(info, "vocab_size", int),
        executor=_executor(info),
        engine=_engine(served, version),
        speculation="; ".join(islice(_speculation(info), 20)) or None,
    )


def _first_model(body: Mapping[str, Any], wanted: str | None) -> dict[str, Any]:
    """The entry of /v1/models that is `wanted`; without a wish, the first."""
    data = body.get("data")
    models = [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []
    for entry in models:
        if wanted is None or entry.get("id") == wanted:
            return entry
    return {}


def _get(client: httpx.Client, path: str) -> dict[str, Any]:
    import httpx

    try:
        response = client.get(path)
    except httpx.HTTPError:
        return {}
    return _json(response) if response.status_code == 200 else {}


def _json(response: httpx.Response) -> dict[str, Any]:
    try:
        value = response.json()
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _find(value: Any, name: str, kind: type, depth: int = 3) -> Any:
    """The first `name` of type `kind` in nested objects."""
    if not isinstance(value, dict) or depth == 0:
        return None
    if type(value.get(name)) is kind:
        return value[name]
    found = (_find(inner, name, kind, depth - 1) for inner in value.values())
    return next((one for one in found if one is not None), None)


def _executor(info: Mapping[str, Any]) -> str | None:
    engine = info.get("engine")
    if _find(info, "simulated", bool):
        return "simulated"
    for holder in (info, engine if isinstance(engine, dict) else {}):
        if isinstance(holder.get("executor"), str):
            return str(holder["executor"])
    return None


def _speculation(value: Any, depth: int = 6) -> Iterator[str]:
    """Fields of speculative decoding in nested objects (SGLang), and in texts that describe one (vLLM)."""
    if isinstance(value, dict) and depth:
        for name, inner in value.items():
            if "speculative" in str(name) or "acceptance" in str(name):
                yield f"{name}={json.dumps(inner)[:500]}"
            else:
                yield from _speculation(inner, depth - 1)
    elif isinstance(value, str):
        yield from (found[0] for found in _SPECULATIVE.finditer(value))


def _engine(served: Mapping[str, Any], version: Mapping[str, Any]) -> str | None:
    """Who answers: the owner that /v1/models names, and the version that /version says."""
    parts = [part for part in (served.get("owned_by"), version.get("version")) if isinstance(part, str)]
    return " ".join(parts) or None
