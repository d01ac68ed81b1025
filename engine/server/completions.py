"""POST /v1/completions and POST /v1/chat/completions: from the body to an answer that runs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from atom.engine.sampling_params import SamplingParams
from atom.engine.server.answer import Answer, Prompt
from atom.engine.server.collected import CollectedAnswer
from atom.engine.server.fields import check_chat_fields, check_completion_fields
from atom.engine.server.formats import AnswerFormat, ChatFormat, CompletionFormat
from atom.engine.server.parameters import (
    AnswerOptions,
    chat_options,
    chat_params,
    completion_options,
    completion_params,
)
from atom.engine.server.prompts import chat_text, check_lengths, check_text_length, completion_prompts, tokenize
from atom.engine.server.protocol import GenerationRequest, decode_chat_completion, decode_completion
from atom.engine.server.service import Exchange, Service
from atom.engine.server.streamed import StreamedAnswer


async def completions(service: Service, exchange: Exchange) -> None:
    with service.admitted():
        request = await service.read(exchange, decode_completion, check_completion_fields)
        model = service.check_model(request.model)
        options = completion_options(request)
        params = completion_params(request, service.vocab_size)
        prompts = await completion_prompts(
            service, request.prompt, add_special_tokens=request.add_special_tokens is not False
        )
        check_lengths(service, prompts, params, "prompt")
        await _answer(service, exchange, CompletionFormat, model, options, request, prompts, params)


async def chat_completions(service: Service, exchange: Exchange) -> None:
    with service.admitted():
        request = await service.read(exchange, decode_chat_completion, check_chat_fields)
        model = service.check_model(request.model)
        options = chat_options(request)
        params = chat_params(request, service.vocab_size)
        text = await chat_text(
            service,
            request.messages,
            add_generation_prompt=request.add_generation_prompt is not False,
            template_kwargs=request.chat_template_kwargs,
        )
        check_text_length(service, text, "messages")
        # The template has spelled the special tokens out already.
        ids = await tokenize(service, text, add_special_tokens=bool(request.add_special_tokens))
        prompts = [Prompt(ids, text)]
        check_lengths(service, prompts, params, "messages")
        await _answer(service, exchange, ChatFormat, model, options, request, prompts, params)


async def _answer(
    service: Service,
    exchange: Exchange,
    format_type: type[AnswerFormat],
    model: str,
    options: AnswerOptions,
    request: GenerationRequest,
    prompts: Sequence[Prompt],
    params: SamplingParams,
) -> None:
    answer_id = f"{format_type.id_prefix}{uuid.uuid4().hex}"
    format = format_type(answer_id, int(time.time()), model, options, service.tokenizer)
    answer_type: type[Answer] = StreamedAnswer if options.stream else CollectedAnswer
    await answer_type(service, exchange, format, request, prompts, params).run()
