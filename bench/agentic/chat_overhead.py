"""What a server's chat template adds to messages, in tokens: asked of its /tokenize (ours and vLLM's have it) before
the load, so that prompts can be as long as recorded by the server's count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from atom.bench.load import Endpoint

if TYPE_CHECKING:
    import httpx

__all__ = ["ChatOverhead", "ask_overhead"]

_MOST: Final = 1000
"""A template that adds more to three messages has something else in it than marks between them."""
_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class ChatOverhead:
    """Tokens beside those of the messages' texts."""

    alone: int
    """Of a user's message (a template may add a system prompt of its own), and the beginning of the answer."""
    with_system: int
    """Of a system prompt and a user's message, and the beginning of the answer."""
    pair: int
    """Of each further answer and user's message."""

    def first(self, role: str) -> int:
        """Of a chat that begins with a message of `role`, without further ones."""
        return self.with_system if role == "system" else self.alone

    def further(self, role: str) -> int:
        """Of one more message of `role`."""
        return self.pair // 2 if role == "assistant" else self.pair - self.pair // 2


def ask_overhead(endpoint: Endpoint, word: str, extra_body: Mapping[str, Any]) -> ChatOverhead | None:
    """None if the server does not say. `word` is one token; `extra_body`: of the load's requests, which may have
    settings of the template."""
    import httpx

    sent = dict(endpoint.headers)
    if endpoint.api_key is not None:
        sent.setdefault("Authorization", f"Bearer {endpoint.api_key}")
    body: dict[str, Any] = {"model": endpoint.model}
    if "chat_template_kwargs" in extra_body:
        body["chat_template_kwargs"] = extra_body["chat_template_kwargs"]
    counts = []
    try:
        with httpx.Client(
            base_url=endpoint.base_url, headers=sent, verify=endpoint.verify_tls, timeout=_TIMEOUT_S, trust_env=False
        ) as client:
            for roles in (("user",), ("system", "user"), ("user", "assistant", "user")):
                messages = [{"role": role, "content": word} for role in roles]
                counts.append(_count(client.post("/tokenize", json={**body, "messages": messages})) - len(roles))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return None
    alone, with_system, longer = counts
    if not 0 <= alone <= longer <= _MOST or not 0 <= with_system <= _MOST:
        return None
    return ChatOverhead(alone, with_system, longer - alone)


def _count(response: httpx.Response) -> int:
    """ValueError if it is no answer of /tokenize."""
    answer = response.json() if response.status_code == 200 else None
    count = answer.get("count") if isinstance(answer, dict) else None
    if type(count) is not int:
        raise ValueError("no count of tokens")
    return count
