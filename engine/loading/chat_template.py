"""Chat templates: the Jinja dialect of Hugging Face, compiled once, rendered in an immutable sandbox with bounded work.
Which template a model has is found by `engine/loading/tokenizer.py`.

A template comes with a model directory and is untrusted. The sandbox keeps it from the interpreter; the meter below
keeps it from looping for ever or from growing strings without end: every loop iteration and call costs one unit of
a budget with a deadline, and whatever multiplies strings (`*`, `%` and `format` widths, `center`, `replace`, `join`,
repeated `~`) is checked against a size before it runs.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from atom.engine.errors import ModelLoadError, RequestError

MAX_TEMPLATE_CHARS: Final = 1 << 20
MAX_OUTPUT_CHARS: Final = 1 << 24
MAX_VALUE_LENGTH: Final = 1 << 24
"""Characters or elements of one intermediate value."""
MAX_RENDER_STEPS: Final = 500_000
MAX_RENDER_SECONDS: Final = 10.0
_MAX_EXPONENT: Final = 64
_HUGE_WIDTH: Final = re.compile(r"%[^a-zA-Z]*\*|\d{6}|:[^{}]*\{")
"""A printf or format width of six digits or more, or one taken from an argument."""


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str, origin: str) -> None:
        """`origin` names the file in errors. Raises `ModelLoadError` when the template does not compile."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelLoadError(f"{origin}: the chat template has more than {MAX_TEMPLATE_CHARS} characters")
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        try:
            tree = environment.parse(source)
            _meter_loops(tree)
            code = environment.compile(tree)
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise ModelLoadError(f"{origin}: the chat template does not compile: {error}") from None
        self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))

    def render(self, variables: dict[str, Any]) -> str:
        """The prompt. Raises `RequestError` for `messages` when the template refuses or fails."""
        token = _meter.set(_Meter())
        try:
            return _join(self._template.generate(variables))
        except jinja2.TemplateError as error:
            raise RequestError(
                f"the chat template refused the messages: {error.message or error}", "messages"
            ) from None
        except RecursionError:
            raise RequestError("the chat template failed: too deeply nested", "messages") from None
        except Exception as error:  # a template can fail in every way that an expression can
            raise RequestError(f"the chat template failed: {type(error).__name__}: {error}", "messages") from None
        finally:
            _meter.reset(token)


def _join(pieces: Iterator[str]) -> str:
    parts: list[str] = []
    total = 0
    for piece in pieces:
        total += len(piece)
        if total > MAX_OUTPUT_CHARS:
            raise jinja2.TemplateRuntimeError(f"its output exceeds {MAX_OUTPUT_CHARS} characters")
        parts.append(piece)
    return "".join(parts)


class _Meter:
    """Work left in one rendering."""

    __slots__ = ("deadline", "steps")

    def __init__(self) -> None:
        self.steps = MAX_RENDER_STEPS
        self.deadline = time.monotonic() + MAX_RENDER_SECONDS

    def tick(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise jinja2.TemplateRuntimeError(f"it took more than {MAX_RENDER_STEPS} steps")
        if time.monotonic() > self.deadline:
            raise jinja2.TemplateRuntimeError(f"it took more than {MAX_RENDER_SECONDS:g} s")


_meter: ContextVar[_Meter] = ContextVar("chat_template_meter")


# pass_context keeps Jinja's optimizer from calling these while it compiles.
@jinja2.pass_context
def _metered(context: jinja2.runtime.Context, iterable: Iterable[Any]) -> Iterator[Any]:
    meter = _meter.get()
    for item in iterable:
        meter.tick()
        yield item


@jinja2.pass_context
def _sized(context: jinja2.runtime.Context, value: Any) -> Any:
    return _check_size(value)


def _check_size(value: Any) -> Any:
    if isinstance(value, (str, bytes, list, tuple)):
        _check_length(len(value))
    return value


def _check_length(length: int) -> None:
    if length > MAX_VALUE_LENGTH:
        raise jinja2.TemplateRuntimeError(f"a value exceeds {MAX_VALUE_LENGTH} characters or elements")


def _meter_loops(tree: jinja2.nodes.Template) -> None:
    """Route every `for` through the meter, and every `~` through the size check."""
    for loop in list(tree.find_all(jinja2.nodes.For)):
        loop.iter = jinja2.nodes.Filter(loop.iter, "atom_metered", [], [], None, None, lineno=loop.lineno)
    for concat in list(tree.find_all(jinja2.nodes.Concat)):
        inner = jinja2.nodes.Concat(concat.nodes, lineno=concat.lineno)
        concat.nodes = [jinja2.nodes.Filter(inner, "atom_sized", [], [], None, None, lineno=concat.lineno)]


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox with the functions that Hugging Face templates expect."""

    intercepted_binops = frozenset(["*", "**", "%", "+"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in ("center", "format", "indent", "join", "replace"):
            self.filters[name] = _guarded_filter(name, self.filters[name])
        self.filters["tojson"] = _tojson
        self.filters["atom_metered"] = _metered
        self.filters["atom_sized"] = _sized
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    # Jinja passes the context and the callee by position; naming them here would take those names from the template.
    def call(self, *args: Any, **kwargs: Any) -> Any:
        _meter.get().tick()
        callee = getattr(args[1], "__wrapped__", args[1])  # the sandbox wraps str.format in a function of its own
        owner = getattr(callee, "__self__", None)
        if isinstance(owner, str):
            _check_string_method(callee.__name__, owner, args[2:], kwargs)
        return super().call(*args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return _check_size(super().call_binop(context, operator, left, right))


def _guarded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter with the checks of the string method of its name. Jinja reads its marks off the function."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        values = [arg for arg in args if not isinstance(arg, (jinja2.Environment, jinja2.nodes.EvalContext))]
        if name == "join" and values and not isinstance(values[0], (list, tuple, str)):
            values[0] = list(values[0])
            args = (*args[: len(args) - len(values)], *values)
        separator = next((value for value in [*values[1:], *kwargs.values()] if isinstance(value, str)), "")
        if name == "join":
            _check_string_method(name, separator, values[:1], {})
        else:
            _check_string_method(name, str(values[0]), values[1:], kwargs)
        return function(*args, **kwargs)

    return guarded


def _check_string_method(name: str, text: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Refuse a call whose result would be out of proportion, before it is computed."""
    values = [*args, *kwargs.values()]
    if name == "replace":
        _check_length(len(text) * max((len(value) for value in values if isinstance(value, str)), default=0))
    elif name == "join" and values and isinstance(values[0], (list, tuple)):
        _check_length(len(text) * len(values[0]) + sum(len(item) for item in values[0] if isinstance(item, str)))
    elif name in ("format", "format_map") and _HUGE_WIDTH.search(text):
        raise jinja2.TemplateRuntimeError("a format width is too large")
    elif name not in ("split", "rsplit", "splitlines"):
        for value in values:
            if isinstance(value, int):
                _check_length(value)


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "*":
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, (str, bytes, list, tuple)) and isinstance(times, int):
                _check_length(len(sequence) * times)
        if isinstance(left, int) and isinstance(right, int) and max(left.bit_length(), right.bit_length()) > 4096:
            raise jinja2.TemplateRuntimeError("a number is too large")
    elif operator == "**":
        if not isinstance(left, float) and (abs(left) > 1 << 32 or abs(right) > _MAX_EXPONENT):
            raise jinja2.TemplateRuntimeError("a power is too large")
    elif operator == "%" and isinstance(left, str) and _HUGE_WIDTH.search(left):
        raise jinja2.TemplateRuntimeError("a format width is too large")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; serving renders its body."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration is a mutable class attribute)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own `tojson` escapes HTML characters, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
