"""`LLM`: a model to call from Python, `LLM("path").generate(prompts)`. A thin layer over `engine/llm_engine.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeAlias

from atom.engine.config import (
    EMBEDDED_MODEL,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SimulatedConfig,
)
from atom.engine.errors import AtomEngineError, ConfigError, EngineDeadError, QueueFullError, RequestError
from atom.engine.llm_engine import LLMEngine
from atom.engine.loading.tokenizer import load_tokenizer
from atom.engine.messages import FINISH_ERROR
from atom.engine.request_output import RequestOutput
from atom.engine.sampling_params import SamplingParams

Prompt: TypeAlias = str | Sequence[int]

_SECTIONS: dict[str, Any] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "simulated": SimulatedConfig,
}


class LLM:
    """A model loaded for offline generation. Use as a context manager, or call `close()`."""

    def __init__(self, model: str | EngineConfig = EMBEDDED_MODEL, **options: Any) -> None:
        """`model`: a Hugging Face directory, a .gguf file, "embedded", or a whole `EngineConfig`.

        `options` are fields of the config's sections by name: `max_model_len=4096, block_size=32, max_num_seqs=64,
        executor="cpu"`. Raises `ConfigError` for an unknown one, `EngineDeadError` when the model cannot be loaded.
        """
        if isinstance(model, EngineConfig):
            if options:
                raise ConfigError("give either an EngineConfig or options, not both")
            config = model
        else:
            config = config_from_options(model=model, **options)
        tokenizer = None
        if config.executor == "simulated" and not isinstance(model, EngineConfig) and "vocab_size" not in options:
            # Without a config.json the simulated model knows no vocabulary: give it the tokenizer's.
            tokenizer = load_tokenizer(config.model.model, config.model.tokenizer, config.model.chat_template)
            simulated = dataclasses.replace(config.simulated, vocab_size=max(16, tokenizer.vocab_size))
            config = dataclasses.replace(config, simulated=simulated)
        self.engine = LLMEngine(config, tokenizer=tokenizer)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """One output per prompt, in order. A prompt is a text or a list of token ids; `sampling_params` is one for
        all or one each. Raises `RequestError`, `EngineDeadError`; nothing keeps running then."""
        batch = _as_prompts(prompts)
        params = _as_params(sampling_params, len(batch))
        done: dict[str, RequestOutput] = {}
        request_ids: list[str] = []
        try:
            for prompt, one in zip(batch, params, strict=True):
                request_ids.append(self._add(prompt, one, done))
            while self.engine.has_unfinished():
                self._step(done)
        except BaseException:
            self._abandon(request_ids)
            raise
        return [done[request_id] for request_id in request_ids]

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        **template_options: Any,
    ) -> RequestOutput:
        """Answer one conversation in OpenAI's format. `template_options` are variables of the chat template."""
        tokenizer = self.engine.tokenizer
        text = tokenizer.apply_chat_template(messages, **template_options)
        (output,) = self.generate([tokenizer.encode(text, add_special_tokens=False)], sampling_params)
        return output

    def _add(self, prompt: Prompt, params: SamplingParams, done: dict[str, RequestOutput]) -> str:
        """Admission is bounded, so with many prompts the next one waits until others have finished."""
        while True:
            try:
                return self.engine.add_request(prompt, params)
            except QueueFullError:
                if not self.engine.has_unfinished():
                    raise
                self._step(done)

    def _step(self, done: dict[str, RequestOutput]) -> None:
        for output in self.engine.step():
            lost = next((one.error for one in output.outputs if one.finish_reason == FINISH_ERROR), None)
            if lost is not None:
                raise EngineDeadError(lost) if self.engine.manager.failure else AtomEngineError(lost)
            done[output.request_id] = output

    def _abandon(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.engine.abort(request_id)
        while self.engine.has_unfinished() and self.engine.manager.is_alive:
            self.engine.step()

    def close(self) -> None:
        """Stop the engine and free its memory. Safe to call twice."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def config_from_options(**options: Any) -> EngineConfig:
    """An `EngineConfig` from the fields of all its sections. Raises `ConfigError` naming an option that is none."""
    sections: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    rest: dict[str, Any] = {}
    own = {field.name for field in dataclasses.fields(EngineConfig)} - _SECTIONS.keys()
    for option, value in options.items():
        section = next(
            (name for name, kind in _SECTIONS.items() if option in {field.name for field in dataclasses.fields(kind)}),
            None,
        )
        if section is not None:
            sections[section][option] = value
        elif option in own:
            rest[option] = value
        else:
            raise ConfigError(f"{option!r} is no option of the engine")
    built = {name: kind(**sections[name]) for name, kind in _SECTIONS.items()}
    return EngineConfig(**built, **rest)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    batch: list[Any] = list(prompts)
    if batch and all(isinstance(entry, int) for entry in batch):
        return [batch]
    if any(isinstance(entry, int) for entry in batch):
        raise RequestError("prompts must be texts or lists of token ids, not both in one list", "prompts")
    return batch


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"got {len(params)} sampling_params for {count} prompts", "sampling_params")
    return list(params)
