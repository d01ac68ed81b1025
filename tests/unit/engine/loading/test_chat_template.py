"""Chat templates: the Hugging Face dialect, errors, and hostile templates."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import pytest

from atom.engine.errors import ModelLoadError, RequestError
from atom.engine.loading import chat_template
from atom.engine.loading.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hé <b>"}, {"role": "assistant", "content": "yes"}]


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source, "test").render({"messages": MESSAGES, **variables})


FEATURES = {
    "blocks-are-trimmed": (
        "{% for m in messages %}\n  {% if true %}\n{{ m.role }}|\n  {% endif %}\n{% endfor %}",
        "user|\nassistant|\n",
    ),
    "loop-controls": (
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
        "yes",
    ),
    "break": ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "user"),
    "loop-variables": (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}",
        "1/2False 2/2True ",
    ),
    "loop-neighbours": (
        "{% for m in messages %}{{ loop.previtem is defined }}{{ loop.nextitem is defined }}{% endfor %}",
        "FalseTrueTrueFalse",
    ),
    "tojson-keeps-html": ("{{ messages[0] | tojson }}", '{"role": "user", "content": "hé <b>"}'),
    "tojson-indent": ("{{ {'a': [1]} | tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "2",
    ),
    "reversed": ("{% for m in messages[::-1] %}{{ m.role }} {% endfor %}", "assistant user "),
    "items": ("{% for k, v in messages[0].items() %}{{ k }},{% endfor %}", "role,content,"),
    "macro": ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(messages[1].content) }}", "[yes]"),
    "recursive-loop": (
        "{% for x in [[1, [2]], [3]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
        "123",
    ),
    "missing-is-empty": ("{% for t in tools %}x{% endfor %}{{ nothing }}{{ 'no' if not tools }}", "no"),
    "generation": ("a{% generation %}{{ messages[1].content }}{% endgeneration %}b", "ayesb"),
    "concatenation": ("{{ messages[0].role ~ 1 ~ messages[1].role }}", "user1assistant"),
    "strings": ("{{ ('a' * 3).replace('a', 'bc') }} {{ '%s-%d' % ('x', 2) }} {{ 'y'.center(3) }}", "bcbcbc x-2  y "),
    "filters": (
        "{{ [1, 2] | join(', ') }} {{ 'a' | replace('a', 'b') }} {{ messages | map(attribute='role') | join('/') }}",
        "1, 2 b user/assistant",
    ),
    "split-strip": ("{{ 'a</t> b '.split('</t>')[-1].strip() }}{{ 'x'.startswith('x') }}", "bTrue"),
}


@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str) -> None:
    source, expected = FEATURES[name]
    assert render(source) == expected


def test_strftime_now() -> None:
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('only user roles') }}", "only user roles"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[7].content.x }}", "messages"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "too deeply nested"),
    ],
)
def test_failures_are_request_errors(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        render(source)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ["{% for m in %}", "{{ 'a' | nofilter }}", "{% endfor %}", "{{" + "(" * 5000 + "}}"])
def test_a_template_that_does_not_compile(source: str) -> None:
    with pytest.raises(ModelLoadError, match=r"file\.jinja: the chat template does not compile"):
        ChatTemplate(source, "file.jinja")


SIZE, WIDTH, STEPS = "a value exceeds", "a format width is too large", "it took more than 20000 steps"
HOSTILE = {
    "attributes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|undefined"),
    "format-attribute": ("{{ '{0.__class__.__init__.__globals__}'.format(messages) }}", "unsafe|undefined"),
    "mutation": ("{{ messages.append(1) }}", "unsafe"),
    "huge-range": ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
    "nested-loops": ("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", STEPS),
    "recursion": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        STEPS,
    ),
    "string-times": ("{{ 'a' * 10**10 }}", SIZE),
    "times-string": ("{{ 10**10 * 'a' }}", SIZE),
    "list-times": ("{{ [1] * 10**10 }}", SIZE),
    "power": ("{{ 10 ** 10 ** 10 }}", "a power is too large"),
    "power-chain": (
        "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x ** 64 %}{% endfor %}",
        "a power is too large",
    ),
    "product-chain": (
        "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "a number is too large",
    ),
    "doubling-tilde": (
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        SIZE,
    ),
    "doubling-plus": (
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        SIZE,
    ),
    "printf-width": ("{{ '%1000000000d' % 1 }}", WIDTH),
    "printf-star": ("{{ '%*d' % (1000000000, 1) }}", WIDTH),
    "format-width": ("{{ '{:>1000000000}'.format(1) }}", WIDTH),
    "format-nested-width": ("{{ '{:>{w}}'.format(1, w=1000000000) }}", WIDTH),
    "format-filter": ("{{ '%1000000000d' | format(1) }}", WIDTH),
    "center": ("{{ 'a'.center(10**10) }}", SIZE),
    "center-filter": ("{{ 'a' | center(10**10) }}", SIZE),
    "indent-filter": ("{{ 'a\nb' | indent(10**10) }}", SIZE),
    "replace": ("{{ ('a' * 10**6).replace('a', 'a' * 10**6) }}", SIZE),
    "replace-filter": ("{{ ('a' * 10**6) | replace('a', 'a' * 10**6) }}", SIZE),
    "join": ("{{ ('a' * 10**6).join(['x'] * 10**6) }}", SIZE),
    "join-filter": ("{{ (['x'] * 10**6) | join('a' * 10**6) }}", SIZE),
    "output": ("{% for i in range(1000) %}{{ 'a' * 10**5 }}{% endfor %}", "its output exceeds"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_STEPS", 20_000)
    source, message = HOSTILE[name]
    with pytest.raises(RequestError, match=message):
        render(source)


@pytest.mark.parametrize("source", ["{{ ''|attr('__class__')|attr('__mro__') }}", "{{ raise_exception.__globals__ }}"])
def test_internals_are_undefined(source: str) -> None:
    assert render(source) == ""


def test_the_deadline_ends_slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_SECONDS", -1.0)
    with pytest.raises(RequestError, match="took more than"):
        render("{% for m in messages %}{% endfor %}")


def test_rendering_leaves_no_state() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}", "test")
    start = time.monotonic()
    assert {template.render({"messages": MESSAGES}) for _ in range(100)} == {"userassistant"}
    assert time.monotonic() - start < chat_template.MAX_RENDER_SECONDS
