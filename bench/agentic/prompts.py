"""The requests of a session: block hash ids become prompts that share what the recording's prompts shared.

A block's tokens depend on (seed, scope, hash id) alone (`bench/datasets/block_tokens.py`). Where a prompt ends inside a
block, and the agent's next turn keeps all of it, its last tokens are the beginning of the block that follows there: a
history grows at its end, as the recorded one did. Completions get token ids, exactly as many as recorded. Chats get
messages of words that are one token each (`bench/datasets/text.py`), the recorded answers as assistant messages; a
template comes on top, so no number of tokens is planned for them; where it is known what it adds, a message has as many
words fewer.

Prompts have 100,000 tokens and more, and are made while others are being timed, in a thread: ids and words are put
into place by table look-ups of NumPy on rows of one width (JSON ignores the spaces), which let other threads run.

Shape suffix: t = tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from atom.bench.agentic.load import AgenticLoad, CacheBust
from atom.bench.agentic.model import Session
from atom.bench.datasets.block_tokens import prompt_tokens, stream_tokens
from atom.bench.datasets.bodies import RequestFields
from atom.bench.datasets.text import load_tokenizer
from atom.bench.load import Api
from atom.bench.random_load import token_range
from atom.recipes.errors import UsageError

if TYPE_CHECKING:
    from atom.bench.datasets.text import WordList

__all__ = ["MARKER_TOKENS", "Message", "PromptMaker", "marker", "messages"]

MARKER_TOKENS: Final = 8
"""Tokens of a marker in prompts of token ids: enough that no two are alike."""
_MARKER_DIGITS: Final = 12
_MARKERS: Final = 1
_TAILS: Final = 2
_MIN_WORDS: Final = 16


class Message(NamedTuple):
    """A part of a prompt, tokens `start` to `end`."""

    role: str
    start: int
    end: int


def marker(load: AgenticLoad, number: int, session: Session) -> str | None:
    """The text that sets session number `number` of a load apart, the same for its warm-up, its turns, its agents.

    Of digits, which vocabularies take one by one or by three: every marker is as many tokens, so that another nonce
    changes nothing else in a prompt.
    """
    if load.cache_bust is CacheBust.NONE:
        return None
    digest = hashlib.sha256(f"{load.nonce}:{load.seed}:{number}:{session.name}".encode()).digest()
    return f"[rid:{int.from_bytes(digest[:8], 'big') % 10**_MARKER_DIGITS:0{_MARKER_DIGITS}}]\n\n"


def messages(session: Session, agent: int, turn: int) -> list[Message]:
    """A turn's prompt as messages: the system prompt in whole blocks, then what the user and the recorded answers
    added turn by turn, cut back where the recording's history was. The last one is the user's."""
    size, turns = session.block_size, session.agents[agent].turns
    system = min(math.ceil(session.agents[agent].system_len / size) * size, turns[0].input_len)
    parts = [Message("system", 0, system)] if system else []
    end = system
    for k in range(turn + 1):
        now = turns[k]
        if k > 0:
            end = _kept_tokens(session, agent, k)
            _cut(parts, end)
            if parts and parts[-1].role != "system":  # no answer before there was anything to answer
                answer = min(end + turns[k - 1].output_len, now.input_len - 1)
                if answer > end:
                    parts.append(Message("assistant", end, answer))
                    end = answer
        if now.input_len > end:
            parts.append(Message("user", end, now.input_len))
    return _ending_with_user(parts)


def _kept_tokens(session: Session, agent: int, turn: int) -> int:
    """Tokens at the start of a turn's prompt that are the start of the previous one's."""
    before, now = session.agents[agent].turns[turn - 1], session.agents[agent].turns[turn]
    kept = now.kept_blocks * session.block_size
    if _goes_on(session, agent, turn - 1):
        kept = max(kept, before.input_len)
    return min(kept, before.input_len, now.input_len)


def _goes_on(session: Session, agent: int, turn: int) -> bool:
    """Whether the tokens after a prompt's last block are the beginning of the next turn's next block."""
    turns = session.agents[agent].turns
    if turn + 1 == len(turns):
        return False
    blocks = turns[turn].kept_blocks + len(turns[turn].new_blocks)
    after = turns[turn + 1]
    return (
        0 < turns[turn].input_len - blocks * session.block_size < session.block_size
        and after.kept_blocks == blocks
        and len(after.new_blocks) > 0
    )


def _cut(parts: list[Message], end: int) -> None:
    """Leave the first `end` tokens."""
    while parts and parts[-1].start >= end:
        parts.pop()
    if parts and parts[-1].end > end:
        parts[-1] = parts[-1]._replace(end=end)


def _ending_with_user(parts: list[Message]) -> list[Message]:
    """A history that was cut back may end with an answer: its last token is the user's then."""
    last = parts[-1]
    if last.role != "user":
        parts = [*parts[:-1], last._replace(end=last.end - 1), Message("user", last.end - 1, last.end)]
        parts = [part for part in parts if part.end > part.start]
    return parts


class PromptMaker:
    """Makes the bodies of one load's requests. Threads may share it."""

    def __init__(self, load: AgenticLoad, words: WordList | None) -> None:
        """`words`: for chats."""
        self._load = load
        self._fields = RequestFields(
            api=load.api,
            model=load.model,
            ignore_eos=load.ignore_eos,
            continuous_usage_stats=load.continuous_usage_stats,
            sampling=load.sampling,
            extra_body=load.extra_body,
        )
        if load.api is Api.CHAT:
            assert words is not None
            self._table = _word_table(words.words)
            self._range = (0, len(self._table))
        else:
            self._range = token_range(load.vocab_size)
            self._table = _id_table(self._range[1])

    def tokens(self, session: Session, agent: int, turn: int) -> npt.NDArray[np.int32]:
        """[input_len] token ids of a turn's prompt without its marker (for chats: words, by their place in a list)."""
        now = session.agents[agent].turns[turn]
        blocks = session.blocks(agent, turn).tolist()
        if _goes_on(session, agent, turn):
            blocks.append(int(session.agents[agent].turns[turn + 1].new_blocks[0]))
        return prompt_tokens(
            blocks,
            now.input_len,
            seed=_scope_seed(self._load.seed, session.scope),
            block_size=session.block_size,
            token_range=self._range,
            tail=(_TAILS, _key(session.name), agent, turn),
        )

    def input_len(self, session: Session, agent: int, turn: int, mark: str | None) -> int | None:
        """Prompt tokens as planned; None for chats."""
        if self._load.api is Api.CHAT:
            return None
        return session.agents[agent].turns[turn].input_len + (0 if mark is None else MARKER_TOKENS)

    def body(self, session: Session, agent: int, turn: int, mark: str | None, output_len: int) -> bytes:
        tokens = self.tokens(session, agent, turn)
        if self._load.api is Api.CHAT:
            prompt = self._messages(session, agent, turn, tokens, mark)
        else:
            prompt = self._ids(session, agent, tokens, mark)
        return self._fields.body(prompt, output_len)

    def _ids(self, session: Session, agent: int, tokens_t: npt.NDArray[np.int32], mark: str | None) -> bytes:
        if mark is not None:
            ids = stream_tokens((_MARKERS, _key(mark)), MARKER_TOKENS, self._range)
            at = 0
            if self._load.cache_bust is CacheBust.FIRST_TURN_PREFIX:
                at = math.ceil(session.agents[agent].system_len / session.block_size) * session.block_size
            tokens_t = np.concatenate([tokens_t[:at], ids, tokens_t[at:]])
        return b"[" + np.take(self._table, tokens_t, axis=0).tobytes()[:-1] + b"]"

    def _messages(
        self, session: Session, agent: int, turn: int, tokens_t: npt.NDArray[np.int32], mark: str | None
    ) -> bytes:
        parts = messages(session, agent, turn)
        marked = 0
        if self._load.cache_bust is CacheBust.FIRST_TURN_PREFIX:
            marked = next(i for i, part in enumerate(parts) if part.role == "user")
        escaped = b"" if mark is None else mark.replace("\n", "\\n").encode()
        made = []
        owed = 0
        for i, part in enumerate(parts):
            owed += self._added(parts, i, mark if i == marked else None)
            left_out = min(owed, part.end - part.start - 1)
            owed -= left_out
            text = np.take(self._table, tokens_t[part.start + left_out : part.end], axis=0).tobytes()[:-1]
            made.append(b'{"role":"%b","content":"%b%b"}' % (part.role.encode(), escaped if i == marked else b"", text))
        return b"[" + b",".join(made) + b"]"

    def _added(self, parts: list[Message], place: int, mark: str | None) -> int:
        """Tokens of message number `place` that are not its words, as far as they are known. Its first words are left
        out for them, not its last: what a turn sends stays the beginning of what the next one sends."""
        overhead = self._load.overhead
        if overhead is None or self._load.tokenizer is None:
            return 0
        role = parts[place].role
        if place == 0:
            tokens = overhead.first(role)
        else:  # the first user's message after a system prompt is counted with it
            tokens = 0 if place == 1 and parts[0].role == "system" else overhead.further(role)
        if mark is not None:
            tokens += load_tokenizer(self._load.tokenizer).count(mark, special_tokens=False)
        return tokens


def _key(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _scope_seed(seed: int, scope: str) -> int:
    return _key(f"{seed}:{scope}")


@lru_cache(maxsize=2)
def _id_table(end: int) -> npt.NDArray[np.uint8]:
    """[end, width] every token id below `end` as JSON text with a comma, filled up with spaces in front."""
    width = len(str(end - 1)) + 1
    rows = "".join(f"{token},".rjust(width) for token in range(end))
    return np.frombuffer(rows.encode(), np.uint8).reshape(end, width)


@lru_cache(maxsize=2)
def _word_table(words: tuple[str, ...]) -> npt.NDArray[np.uint8]:
    """[words, width] the words of the commonest length, each with a space behind it."""
    plain = [word for word in words if word.isascii() and word.isalpha()]
    lengths = Counter(map(len, plain))
    length = max(lengths, key=lambda n: (lengths[n], -n))
    chosen = [word for word in plain if len(word) == length]
    if len(chosen) < _MIN_WORDS:
        raise UsageError(
            f"--tokenizer: only {len(chosen)} words of one length are one token each, too few for prompts; send token "
            "ids (completions), or leave --tokenizer out"
        )
    return np.frombuffer("".join(f"{word} " for word in chosen).encode(), np.uint8).reshape(len(chosen), length + 1)
