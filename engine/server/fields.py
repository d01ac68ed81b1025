"""Fields that are known but not implemented, and fields that are unknown.

A client that asks for something must get it or be told: a known field that this server does not implement is refused
with a 400 that names it, unless its value is the one that asks for nothing. A field that nobody knows (clients add
their own) is ignored, and its name is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from atom.engine.server.api_errors import invalid
from atom.engine.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

log = logging.getLogger(__name__)

MAX_UNKNOWN_NAMES: Final = 100
"""Names of unknown fields that are remembered, so that a client that invents names cannot fill memory or the log."""
MAX_NAME_CHARS: Final = 64

Accepted = tuple[Any, ...]
"""Values, beside null, that ask for nothing."""

_GENERATION: Final[Mapping[str, Accepted]] = {
    # OpenAI
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    # vLLM
    "allowed_token_ids": (),
    "bad_words": ([],),
    "cache_salt": (),
    "early_stopping": (False,),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "priority": (0,),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
_COMPLETION: Final[Mapping[str, Accepted]] = {**_GENERATION, "prompt_embeds": (), "suffix": ("",)}
_CHAT: Final[Mapping[str, Accepted]] = {
    **_GENERATION,
    # OpenAI
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (False,),
    "prediction": (),
    "reasoning_effort": (),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
    # vLLM
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}
_TOKENIZE: Final[Mapping[str, Accepted]] = {
    "chat_template": (),
    "continue_final_message": (False,),
    "mm_processor_kwargs": ({},),
    "tools": ([],),
}

FieldCheck = Callable[[Mapping[str, msgspec.Raw]], None]


def _checker(request: type[msgspec.Struct], unsupported: Mapping[str, Accepted]) -> FieldCheck:
    known = frozenset(request.__struct_fields__)

    def check(fields: Mapping[str, msgspec.Raw]) -> None:
        for name in fields.keys() - known:
            if name in unsupported:
                _refuse_unless_off(name, fields[name], unsupported[name])
            else:
                _note_unknown(name)

    return check


def _refuse_unless_off(name: str, raw: msgspec.Raw, accepted: Accepted) -> None:
    value = msgspec.json.decode(raw)
    if value is not None and value not in accepted:
        raise invalid(f"{name} is not supported by this server", name, "unsupported_parameter")


_unknown_names: set[str] = set()


def _note_unknown(name: str) -> None:
    if len(_unknown_names) >= MAX_UNKNOWN_NAMES:
        return
    shown = name[:MAX_NAME_CHARS]
    if shown not in _unknown_names:
        _unknown_names.add(shown)
        log.warning("ignoring the unknown request field %r (said once)", shown)
        if len(_unknown_names) == MAX_UNKNOWN_NAMES:
            log.warning("more than %d unknown request fields: no more will be named", MAX_UNKNOWN_NAMES)


check_completion_fields = _checker(CompletionRequest, _COMPLETION)
check_chat_fields = _checker(ChatCompletionRequest, _CHAT)
check_tokenize_fields = _checker(TokenizeRequest, _TOKENIZE)
check_detokenize_fields = _checker(DetokenizeRequest, {})
