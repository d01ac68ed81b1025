"""POST /tokenize and POST /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Any

from atom.engine.server.api_errors import invalid
from atom.engine.server.fields import check_detokenize_fields, check_tokenize_fields
from atom.engine.server.prompts import LONG_IDS, chat_text, in_thread_if, tokenize
from atom.engine.server.protocol import decode_detokenize, decode_tokenize
from atom.engine.server.service import Exchange, Service
from atom.engine.server.status import reply


async def tokenize_prompt(service: Service, exchange: Exchange) -> None:
    request = await service.read(exchange, decode_tokenize, check_tokenize_fields)
    service.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    if request.messages is not None:
        text = await chat_text(
            service,
            request.messages,
            add_generation_prompt=request.add_generation_prompt is not False,
            template_kwargs=request.chat_template_kwargs,
        )
        ids = await tokenize(service, text, add_special_tokens=bool(request.add_special_tokens))
    else:
        assert request.prompt is not None
        for name in ("add_generation_prompt", "chat_template_kwargs"):
            if getattr(request, name) is not None:
                raise invalid(f"{name} needs messages", name)
        special = request.add_special_tokens is not False
        ids = await tokenize(service, request.prompt, add_special_tokens=special)
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": service.max_model_len,
        "tokens": list(ids),
        "token_strs": None,
    }
    if request.return_token_strs:
        text_of = service.tokenizer.token_text
        answer["token_strs"] = await in_thread_if(
            service, len(ids) > LONG_IDS, lambda: [text_of(token_id) for token_id in ids]
        )
    reply(exchange, answer)


async def detokenize_ids(service: Service, exchange: Exchange) -> None:
    request = await service.read(exchange, decode_detokenize, check_detokenize_fields)
    service.check_model(request.model)
    ids = request.tokens
    if ids and not 0 <= min(ids) <= max(ids) < service.vocab_size:
        raise invalid(f"tokens has an id outside [0, {service.vocab_size})", "tokens")
    text = await in_thread_if(
        service, len(ids) > LONG_IDS, lambda: service.tokenizer.decode(ids, skip_special_tokens=False)
    )
    reply(exchange, {"prompt": text})
