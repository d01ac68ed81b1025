"""From a decoded body to what the engine needs: `SamplingParams` and how the answer is to look. No I/O.

Raises `ApiError` 400 and `RequestError`, both naming the parameter as the client spelled it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeVar

from atom.engine.errors import RequestError
from atom.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from atom.engine.server.api_errors import invalid
from atom.engine.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest

_Number = TypeVar("_Number", int, float)

COMPLETION_MAX_TOKENS: Final = 16
"""OpenAI's default for completions; chat goes on to the end of the context."""


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What the answer contains beside the text."""

    stream: bool
    include_usage: bool
    continuous_usage: bool
    """Usage on every chunk of a stream."""
    logprobs: int | None
    """Alternatives per token; None: no logprobs."""
    prompt_logprobs: int | None
    token_ids: bool
    echo: bool = False


def completion_options(request: CompletionRequest) -> AnswerOptions:
    return _options(request, request.logprobs, echo=bool(request.echo))


def chat_options(request: ChatCompletionRequest) -> AnswerOptions:
    if request.top_logprobs is not None and not 0 <= request.top_logprobs <= MAX_LOGPROBS:
        raise invalid(f"top_logprobs must be in [0, {MAX_LOGPROBS}], got {request.top_logprobs}", "top_logprobs")
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    return _options(request, (request.top_logprobs or 0) if request.logprobs else None)


def _options(request: GenerationRequest, logprobs: int | None, *, echo: bool = False) -> AnswerOptions:
    stream = bool(request.stream)
    wanted = request.stream_options
    if wanted is not None and not stream:
        raise invalid("stream_options needs stream: true", "stream_options")
    if stream and request.prompt_logprobs is not None:
        raise invalid("prompt_logprobs are not available in a stream", "prompt_logprobs")
    return AnswerOptions(
        stream=stream,
        include_usage=bool(wanted and wanted.include_usage),
        continuous_usage=bool(wanted and wanted.continuous_usage_stats),
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        token_ids=bool(request.return_token_ids),
        echo=echo,
    )


def completion_params(request: CompletionRequest, vocab_size: int) -> SamplingParams:
    n = 1 if request.n is None else request.n
    if request.best_of is not None and request.best_of != n:
        raise invalid("best_of other than n is not supported by this server", "best_of", "unsupported_parameter")
    max_tokens = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    prompt_logprobs = request.prompt_logprobs
    if request.echo and request.logprobs is not None:
        prompt_logprobs = max(request.logprobs, prompt_logprobs or 0)
    return _params(request, max_tokens, request.logprobs, prompt_logprobs, vocab_size)


def chat_params(request: ChatCompletionRequest, vocab_size: int) -> SamplingParams:
    max_tokens, name = request.max_completion_tokens, "max_completion_tokens"
    if max_tokens is None:
        max_tokens, name = request.max_tokens, "max_tokens"
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    try:
        return _params(request, max_tokens, logprobs, request.prompt_logprobs, vocab_size)
    except RequestError as error:
        if error.param == "max_tokens":
            raise RequestError(str(error).replace("max_tokens", name, 1), name) from None
        raise


def _params(
    request: GenerationRequest,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    vocab_size: int,
) -> SamplingParams:
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    params = SamplingParams(
        n=_or(request.n, 1),
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=_or(request.top_k, 0),
        min_p=_or(request.min_p, 0.0),
        seed=request.seed,
        stop=stop,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        max_tokens=max_tokens,
        min_tokens=_or(request.min_tokens, 0),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        logit_bias=request.logit_bias,
        skip_special_tokens=request.skip_special_tokens is not False,
    )
    params.validate(vocab_size)
    return params


def _or(value: _Number | None, default: _Number) -> _Number:
    return default if value is None else value
