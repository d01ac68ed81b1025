"""JUnit XML, the format in which CI systems take results. What is a test case is decided by whoever has results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

__all__ = ["JunitCase", "junit_xml"]


@dataclass(frozen=True, slots=True)
class JunitCase:
    """A case passes unless it has a failure (it was found wrong) or an error (it could not be found out)."""

    name: str
    failure: str | None = None
    error: str | None = None


def junit_xml(name: str, cases: Sequence[JunitCase], properties: Mapping[str, str]) -> str:
    """One test suite. Texts may hold anything; the first line of a failure is its message."""
    failures, errors = sum(bool(case.failure) for case in cases), sum(bool(case.error) for case in cases)
    counts = f'tests="{len(cases)}" failures="{failures}" errors="{errors}"'
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f"<testsuite name={_attribute(name)} {counts}>",
        "  <properties>",
    ]
    lines += [f"    <property name={_attribute(key)} value={_attribute(value)}/>" for key, value in properties.items()]
    lines.append("  </properties>")
    for case in cases:
        head = f"  <testcase classname={_attribute(name)} name={_attribute(case.name)}"
        found = [(kind, text) for kind, text in (("failure", case.failure), ("error", case.error)) if text]
        if not found:
            lines.append(f"{head}/>")
            continue
        lines.append(f"{head}>")
        for kind, text in found:
            message = _attribute(text.partition("\n")[0])
            lines.append(f"    <{kind} message={message}>{escape(_clean(text))}</{kind}>")
        lines.append("  </testcase>")
    return "\n".join([*lines, "</testsuite>", ""])


def _attribute(text: str) -> str:
    return quoteattr(_clean(text))


def _clean(text: str) -> str:
    """Without the characters that XML cannot hold: messages come from servers."""
    return "".join(c for c in text if c in "\t\n\r" or (c >= " " and not "\ud800" <= c <= "\udfff" and c < "\ufffe"))
