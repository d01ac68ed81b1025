"""From the prompt of a body to token ids that the engine can take. What is long is tokenized in a thread.

The thread goes through `encode_batch`: the tokenizers library gives up the GIL there, and not in `encode` (1.8 MB of
text: the event loop stood still for 26 ms instead of 6.8 s).
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from atom.engine.errors import ContextLengthError, RequestError
from atom.engine.sampling_params import SamplingParams
from atom.engine.server.answer import MAX_SEQUENCES, Prompt
from atom.engine.server.api_errors import invalid
from atom.engine.server.protocol import ChatMessage, ContentPart
from atom.engine.server.service import Service

LONG_CHARS: Final = 8192
LONG_IDS: Final = 16384
ROLES: Final = ("system", "developer", "user", "assistant")
_RESERVED_VARIABLES: Final = frozenset({"self", "messages", "add_generation_prompt", "tools", "documents"})

T = TypeVar("T")


async def completion_prompts(service: Service, prompt: Any, *, add_special_tokens: bool) -> list[Prompt]:
    """`prompt` as `CompletionRequest.prompt` allows it. Raises `ApiError` for a mixture or nothing."""
    if isinstance(prompt, str):
        return [await _text_prompt(service, prompt, add_special_tokens)]
    if not len(prompt):
        raise invalid("prompt must not be empty", "prompt")
    first = prompt[0]
    if isinstance(first, int):
        return [await in_thread_if(service, len(prompt) > LONG_IDS, _ids_prompt, service.vocab_size, prompt)]
    if len(prompt) > MAX_SEQUENCES:
        raise invalid(f"prompt has {len(prompt)} elements, more than {MAX_SEQUENCES}", "prompt")
    if any(type(element) is not type(first) for element in prompt):
        raise invalid("prompt mixes texts, token ids and lists of token ids", "prompt")
    if isinstance(first, str):
        return [await _text_prompt(service, text, add_special_tokens) for text in prompt]
    long = sum(map(len, prompt)) > LONG_IDS
    return await in_thread_if(service, long, lambda: [_ids_prompt(service.vocab_size, ids) for ids in prompt])


async def _text_prompt(service: Service, text: str, add_special_tokens: bool) -> Prompt:
    check_text_length(service, text, "prompt")
    return Prompt(await tokenize(service, text, add_special_tokens=add_special_tokens), text)


def check_text_length(service: Service, text: str, param: str) -> None:
    """Raise `ContextLengthError` for a text that cannot fit whatever its tokens: tokenizing 16 MB holds gigabytes."""
    longest = service.tokenizer.longest_token_chars
    if longest is not None and len(text) > longest * service.max_model_len:
        raise ContextLengthError(
            f"this model's context length is {service.max_model_len} tokens of at most {longest} characters; "
            f"the prompt of {len(text)} characters does not fit",
            param,
        )


async def tokenize(service: Service, text: str, *, add_special_tokens: bool) -> Sequence[int]:
    if len(text) <= LONG_CHARS:
        return service.tokenizer.encode(text, add_special_tokens)
    return await in_thread_if(service, True, _encode_long, service, text, add_special_tokens)


def _encode_long(service: Service, text: str, add_special_tokens: bool) -> Sequence[int]:
    return array("i", service.tokenizer.encode_batch([text], add_special_tokens)[0])


def _ids_prompt(vocab_size: int, token_ids: Any) -> Prompt:
    try:
        ids = token_ids if isinstance(token_ids, array) else array("i", token_ids)
    except TypeError:
        raise invalid("prompt mixes texts, token ids and lists of token ids", "prompt") from None
    except OverflowError:
        raise invalid(f"prompt has a token id outside [0, {vocab_size})", "prompt") from None
    if ids:
        view = np.frombuffer(ids, dtype=np.int32)
        if view.min() < 0 or view.max() >= vocab_size:
            raise invalid(f"prompt has a token id outside [0, {vocab_size})", "prompt")
    return Prompt(ids, None)


async def in_thread_if(service: Service, long: bool, function: Callable[..., T], *args: Any) -> T:
    if not long:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(service.workers, function, *args)


def check_lengths(service: Service, prompts: Sequence[Prompt], params: SamplingParams, param: str) -> None:
    """Raise `RequestError` for `param` unless every prompt, with what is to be generated, fits the engine."""
    scheduler = service.engine_config.scheduler
    wanted = 1 if params.max_tokens is None else params.max_tokens
    for prompt in prompts:
        length = len(prompt.token_ids)
        if not length:
            raise RequestError("the prompt must hold at least one token", param)
        if length + wanted > service.max_model_len:
            asked = "" if params.max_tokens is None else f" plus {params.max_tokens} tokens to generate"
            raise ContextLengthError(
                f"this model's context length is {service.max_model_len} tokens; "
                f"the prompt of {length} tokens{asked} does not fit",
                param,
            )
        if not scheduler.enable_chunked_prefill and length > scheduler.max_num_batched_tokens:
            raise ContextLengthError(
                f"a prompt of {length} tokens is more than --max-num-batched-tokens "
                f"{scheduler.max_num_batched_tokens}, and chunked prefill is off",
                param,
            )


async def chat_text(
    service: Service,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool,
    template_kwargs: dict[str, Any] | None,
) -> str:
    """The conversation through the model's chat template. Raises `ApiError` and `RequestError`."""
    if not messages:
        raise invalid("messages must not be empty", "messages")
    kwargs = template_kwargs or {}
    for name in kwargs:
        if name in _RESERVED_VARIABLES or not name.isidentifier():
            raise invalid(f"chat_template_kwargs must not set {name!r}", "chat_template_kwargs")
    plain = [_message(index, message) for index, message in enumerate(messages)]
    long = sum(len(message["content"]) + 64 for message in plain) > LONG_CHARS
    return await in_thread_if(
        service, long, lambda: service.tokenizer.apply_chat_template(plain, add_generation_prompt, **kwargs)
    )


def _message(index: int, message: ChatMessage) -> dict[str, Any]:
    where = f"messages[{index}]"
    if message.role not in ROLES:
        shown = message.role[:64]
        raise invalid(f"{where}.role must be one of {', '.join(ROLES)}; got {shown!r}", f"{where}.role")
    for name in ("tool_calls", "function_call", "audio", "refusal"):
        if getattr(message, name):
            raise invalid(f"{where}.{name} is not supported by this server", f"{where}.{name}", "unsupported_parameter")
    content = message.content
    if content is None:
        raise invalid(f"{where}.content is required", f"{where}.content")
    if not isinstance(content, str):
        content = "\n".join([_part(f"{where}.content[{place}]", part) for place, part in enumerate(content)])
    return {"role": message.role, "content": content, "name": message.name}


def _part(where: str, part: ContentPart) -> str:
    if part.type != "text":
        raise invalid(f"{where}.type {part.type[:64]!r} is not supported; only text is", f"{where}.type")
    if part.text is None:
        raise invalid(f"{where}.text is required", f"{where}.text")
    return part.text
