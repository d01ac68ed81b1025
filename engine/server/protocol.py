"""The bodies that the server takes, field by field. null means the default, as with OpenAI.

Only types are checked here (strictly: "5" is no integer); ranges are `SamplingParams.validate`'s, and fields that are
known but not implemented are refused in `engine/server/fields.py`. From these to an engine request:
`engine/server/parameters.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What completions and chat completions have in common."""

    model: str | None = None
    """None: the one that is served."""
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """With `safety_identifier` and `metadata`: for the request log."""
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    prompt: str | list[int | str | list[int]]
    """One text, several texts, the token ids of one prompt, or those of several."""
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None
    audio: Any = None
    refusal: str | None = None


class ChatCompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


decode_completion = msgspec.json.Decoder(CompletionRequest).decode
decode_chat_completion = msgspec.json.Decoder(ChatCompletionRequest).decode
decode_tokenize = msgspec.json.Decoder(TokenizeRequest).decode
decode_detokenize = msgspec.json.Decoder(DetokenizeRequest).decode
