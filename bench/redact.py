"""Secrets stay out of run directories: people attach those to pull requests.

One rule for command lines, options, environments and what run.json holds: a value is hidden where its name (a flag, a
variable, a field) looks like a secret's, and a URL loses its `user:password@` wherever it stands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = ["REDACTED", "redact", "redact_arguments", "redact_environment", "redact_option", "redact_text"]

REDACTED: Final = "<redacted>"
_WORDS: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_WORDS: Final = frozenset(
    (
        *("apikey", "secret", "password", "passwd", "passphrase", "credential", "credentials", "authorization"),
        *("bearer", "cookie", "cookies"),
    )
)
_SECRET_LAST: Final = frozenset(("key", "auth", "pwd", "pass"))
"""Secrets only at the end of a name: `ACCESS_KEY`, but not `--key-length`."""
_NO_SECRET_LAST: Final = frozenset((("sort", "key"), ("forward", "pass"), ("per", "pass"), ("single", "pass")))
_SAYS_NO_MORE: Final = frozenset(("pem",))
"""At the end of a name it does not change what the words before it say, like a number there."""
_NO_SECRET_BEFORE_TOKEN: Final = frozenset(
    (
        *("bos", "eos", "pad", "unk", "sep", "cls", "mask", "per", "stop"),
        *("image", "audio", "video", "special", "min", "max", "num"),
    )
)
_NO_SECRET_AFTER_TOKEN: Final = frozenset(
    (
        *("id", "ids", "len", "length", "type", "range", "threshold", "budget", "limit", "count", "usage", "ratio"),
        *("map", "to", "index", "level", "shift", "timeout"),
    )
)
_SECRET_BEFORE_TOKENS: Final = frozenset(
    ("hf", "api", "auth", "access", "refresh", "session", "user", "github", "gitlab", "wandb", "huggingface")
)
"""Of tokens most names say how many there are, so it takes another word to be a secret."""
_HIDDEN_FLAGS: Final = frozenset(("--api-key", "--header", "-H"))
"""Whatever follows is hidden, whatever it looks like: headers carry keys under any name."""
_USERINFO: Final = re.compile(r"(?<=://)[^\s/?#\"]*@")
_QUERY: Final = re.compile(r"(?<=[?&])([\w.-]+)=([^&#\s\"]+)")
_ASSIGNED: Final = re.compile(r"(-{0,2}[A-Za-z_][\w.-]*)=")
_NAME_IN_TEXT: Final = re.compile(
    r"(?<![^\s\"'`;|(,])"  # where a word of a shell begins
    r"(?:(?P<header>-H)[ =]*|(?P<flag>--[A-Za-z][\w-]*)(?:=|\s+(?!--))|(?P<variable>[A-Za-z_][\w.-]*)=)"
)
_WORD_OF_SHELL: Final = re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s"';])+|\S+""")


def is_secret(name: str) -> bool:
    """Whether a flag, variable or field of this name holds a secret, as far as the name tells."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if not _SECRET_WORDS.isdisjoint(words):
        return True
    while words and (words[-1].isdigit() or words[-1] in _SAYS_NO_MORE):
        words.pop()
    if words and words[-1] in _SECRET_LAST and tuple(words[-2:]) not in _NO_SECRET_LAST:
        return True
    if words[-1:] == ["tokens"] and not _SECRET_BEFORE_TOKENS.isdisjoint(words[-2:-1]):
        return True
    return any(
        word.endswith("token")
        and (at == 0 or words[at - 1] not in _NO_SECRET_BEFORE_TOKEN)
        and (at + 1 == len(words) or words[at + 1] not in _NO_SECRET_AFTER_TOKEN)
        for at, word in enumerate(words)
    )


def redact_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Values of variables named like secrets (HF_TOKEN, X_API_KEY, …) replaced."""
    return {name: REDACTED if is_secret(name) else redact_text(value) for name, value in env.items()}


def redact_arguments(command: Sequence[str]) -> list[str]:
    """Values of options named like secrets (`--api-key X`, `--api-key=X`, `-e HF_TOKEN=X`) replaced, and whatever
    else `redact_text` finds."""
    shown: list[str] = []
    after_secret, must_follow, first = False, False, True
    for word in command:
        name, equals, _ = word.partition("=")
        if must_follow or (after_secret and not word.startswith("--" if first else "-")):
            shown.append(REDACTED)  # also the further values of an option that takes several
            must_follow, first = False, False
            continue
        first = True  # a secret may begin with a dash
        after_secret = word.startswith("-") and not equals and (word in _HIDDEN_FLAGS or is_secret(word))
        must_follow = word in _HIDDEN_FLAGS
        if equals and name in _HIDDEN_FLAGS:
            shown.append(f"{name}={REDACTED}")
        elif word.startswith("-H") and len(word) > 2:
            shown.append(f"-H{REDACTED}")
        else:
            shown.append(redact_text(word))
    return shown


def redact_option(flag: str, value: Any) -> Any:
    """One option's value, or its values."""
    if isinstance(value, list | tuple):
        return [redact_option(flag, one) for one in value]
    if not isinstance(value, str):
        return value
    return REDACTED if is_secret(flag) else redact_text(value)


def redact_text(text: str) -> str:
    """`NAME=VALUE` (or `--flag=NAME=VALUE`) with a secret's name, secret fields of a JSON object, secret flags and
    variables of a command line in one string, and the user and password of every URL."""
    at = 0
    while (assigned := _ASSIGNED.match(text, at)) is not None:
        at = assigned.end()
        if assigned[1] in _HIDDEN_FLAGS or is_secret(assigned[1]):
            return text[:at] + REDACTED
    names, value = text[:at], text[at:]
    if value.lstrip()[:1] in ("{", "["):
        try:
            content = json.loads(value)
        except (ValueError, RecursionError):
            content = None
        if isinstance(content, dict | list) and (hidden := redact(content)) != content:
            return names + json.dumps(hidden)
    return names + _without_named(_without_credentials(value))


def redact(value: Any) -> Any:
    """A JSON value: texts under secret names replaced at any depth, and `user:password@` taken out of every URL."""
    if isinstance(value, Mapping):
        return {
            key: REDACTED if is_secret(str(key)) and isinstance(one, str) and one else redact(one)
            for key, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(one) for one in value]
    return _without_credentials(value) if isinstance(value, str) else value


def _without_credentials(text: str) -> str:
    """Of every URL in it."""
    if "://" not in text:
        return text
    return _QUERY.sub(
        lambda found: f"{found[1]}={REDACTED}" if is_secret(found[1]) else found[0], _USERINFO.sub("", text)
    )


def _without_named(text: str) -> str:
    """Values of secret flags and variables of a command line that is one string, as in `bash -c "…"`."""
    parts: list[str] = []
    at = 0
    for found in _NAME_IN_TEXT.finditer(text):
        name = found["header"] or found["flag"] or found["variable"]
        if found.start() < at or not (name in _HIDDEN_FLAGS or is_secret(name)):
            continue
        if (value := _WORD_OF_SHELL.match(text, found.end())) is not None:
            parts += [text[at : found.end()], REDACTED]
            at = value.end()
    return "".join(parts) + text[at:]
