"""Answers in one piece: collect the events of every choice, then send one JSON object."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from atom.engine.messages import TokenLogprobs
from atom.engine.server.answer import Answer, Choice, Prompt, log
from atom.engine.server.api_errors import ApiError
from atom.engine.server.formats import PromptDetails, encode_json
from atom.engine.streaming import TokenEvent

HEAVY_LOGPROBS = 2000
"""From so many entries on, an answer with logprobs is built in a thread."""


class CollectedChoice(Choice):
    """Keeps what the answer will show."""

    __slots__ = ("logprobs", "prompt_logprobs", "stop_reason", "texts", "token_ids")

    def __init__(self, answer: Answer, index: int, prompt: Prompt) -> None:
        super().__init__(answer, index, prompt)
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.stop_reason: str | int | None = None

    def take(self, event: TokenEvent) -> None:
        if event.text:
            self.texts.append(event.text)
        self.token_ids.extend(event.token_ids)
        if event.logprobs is not None:
            self.logprobs.extend(event.logprobs)
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        self.stop_reason = event.stop_reason

    @property
    def num_logprob_entries(self) -> int:
        entries = [*self.logprobs[:1], *(self.prompt_logprobs or [])[1:2]]
        width = max((len(entry.token_ids) for entry in entries if entry is not None), default=0)
        return width * (len(self.logprobs) + len(self.prompt_logprobs or ()))


class CollectedAnswer(Answer):
    streams = False

    choices: list[CollectedChoice]  # type: ignore[assignment]
    _building: asyncio.Task[None] | None = None

    def new_choice(self, index: int, prompt: Prompt) -> CollectedChoice:
        return CollectedChoice(self, index, prompt)

    def begin(self) -> None:
        """Nothing is sent before all is there."""

    def send_error(self, error: ApiError) -> None:
        raise AssertionError("the response is sent in one piece")

    def complete(self) -> None:
        if sum(choice.num_logprob_entries for choice in self.choices) < HEAVY_LOGPROBS:
            self.writer.respond(200, self._body(self.choices))
        else:
            self._building = asyncio.get_running_loop().create_task(self._respond_from_thread(self.choices))

    async def _respond_from_thread(self, choices: Sequence[CollectedChoice]) -> None:
        loop = asyncio.get_running_loop()
        try:
            body = await loop.run_in_executor(self.service.workers, self._body, choices)
        except Exception:
            log.exception("request %s failed in the server", self.exchange.request_id)
            self.fail(ApiError(500, "the server failed to build the answer"))
            return
        if self.error is None:
            self.writer.respond(200, body)

    def _body(self, choices: Sequence[CollectedChoice]) -> bytes:
        body = self.format.whole_head()
        shown = [self._choice(choice) for choice in choices]
        body["choices"] = shown
        body["usage"] = self.usage()
        details = [
            PromptDetails(
                choice.prompt.token_ids if self.options.token_ids else None,
                choice.prompt_logprobs,
            )
            for choice in choices
        ]
        self.format.add_prompt_details(body, shown, details)
        return encode_json(body)

    def _choice(self, choice: CollectedChoice) -> dict[str, Any]:
        text = "".join(choice.texts)
        token_ids: list[int] = choice.token_ids
        entries: list[TokenLogprobs | None] = list(choice.logprobs)
        if self.options.echo:
            prompt = choice.prompt
            if prompt.text is None:
                text = self.service.tokenizer.decode(prompt.token_ids, skip_special_tokens=False) + text
            else:
                text = prompt.text + text
            if self.options.logprobs is not None and choice.prompt_logprobs is not None:
                token_ids = [*prompt.token_ids, *token_ids]
                entries = [*choice.prompt_logprobs, *entries]
        logprobs = None
        if self.options.logprobs is not None:
            logprobs = self.format.logprobs_formatter().format(token_ids, entries)
        shown = self.format.choice(choice.index, text, logprobs)
        shown["finish_reason"] = choice.finish_reason
        shown["stop_reason"] = choice.stop_reason
        if self.options.token_ids:
            shown["token_ids"] = choice.token_ids
        return shown
