"""Reading a recipe's YAML as untrusted input: bounded, without aliases or duplicate keys, checked against schema.json.
A suite of loads is read in the same way, by a schema of its own.

Every error names the file, the line, the field's path and what would be right. What the fields mean once they are
valid is `recipes/recipe.py` and `recipes/suite.py`.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import yaml

from atom.recipes.errors import UsageError

if TYPE_CHECKING:
    import jsonschema

__all__ = ["MAX_RECIPE_BYTES", "RECIPE", "SUITE", "DocumentKind", "RecipeDocument", "read_document", "read_recipe_file"]

MAX_RECIPE_BYTES: Final = 1 << 20
_MAX_DEPTH: Final = 50

FieldPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class DocumentKind:
    word: str
    schema: str
    """File beside this one."""
    fields: str
    """Such as it must have, for an error message."""


RECIPE: Final = DocumentKind("recipe", "schema.json", "`name:` and `command:`")
SUITE: Final = DocumentKind("suite", "suite_schema.json", "`name:` and `loads:`")


class RecipeDocument:
    """A valid recipe (or suite) as plain data, and where each of its fields stands in the file."""

    def __init__(
        self, source: str, data: dict[str, Any], lines: dict[FieldPath, int], kind: DocumentKind = RECIPE
    ) -> None:
        self.source = source
        self.data = data
        self._lines = lines
        self._kind = kind

    def error(self, path: FieldPath, message: str) -> UsageError:
        """An error about the field at `path`, with its place in the file."""
        return _field_error(self._kind, self.source, self._lines, path, message)


def read_recipe_file(path: Path) -> RecipeDocument:
    """Parse and check one recipe; UsageError names the file, line, field and what would be right."""
    return read_document(path, RECIPE)


def read_document(path: Path, kind: DocumentKind) -> RecipeDocument:
    """The same for a file of `kind`."""
    source, word = str(path), kind.word
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_RECIPE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{word} {source}: cannot read it: {error.strerror}") from None
    if len(raw) > MAX_RECIPE_BYTES:
        raise UsageError(f"{word} {source}: larger than {MAX_RECIPE_BYTES} bytes; a {word} is a short YAML file")
    lines: dict[FieldPath, int] = {}
    try:
        root = _Loader(raw.decode("utf-8")).get_single_node()
        data = None if root is None else _build(root, (), lines)
    except UnicodeDecodeError:
        raise UsageError(f"{word} {source}: must be UTF-8 text") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{word} {source}: {_yaml_message(error)}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{word} {source}: must be a mapping of fields such as {kind.fields}")
    found = _validator(kind).iter_errors(data)
    errors = sorted(found, key=lambda error: [str(part) for part in error.absolute_path])
    if errors:
        where, message = _explain(kind, errors[0])
        raise _field_error(kind, source, lines, where, message)
    return RecipeDocument(source, data, lines, kind)


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses aliases: a few nested ones expand to billions of values."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not allowed; repeat the value", mark)
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, "nested too deeply", self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _build(node: yaml.Node, path: FieldPath, lines: dict[FieldPath, int]) -> Any:
    """The node as plain data; `lines` gets the line of each field."""
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise ValueError(f"line {line}: a field's name must be a plain word")
            if key in result:
                raise ValueError(f"line {line}: field `{_dotted((*path, key))}` is given twice; keep one")
            lines[(*path, key)] = line
            result[key] = _build(value_node, (*path, key), lines)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_build(child, (*path, index), lines) for index, child in enumerate(node.value)]
    return _scalar(node, path)


_SCALARS: Final = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "timestamp")}


def _scalar(node: yaml.Node, path: FieldPath) -> Any:
    if node.tag not in _SCALARS:
        raise ValueError(
            f"line {node.start_mark.line + 1}: field `{_dotted(path)}` has the tag {node.tag}; use plain values"
        )
    if node.tag.endswith(":timestamp"):
        return node.value
    constructor = yaml.constructor.SafeConstructor()
    return constructor.construct_object(node)


def _yaml_message(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem or error.context}"
    return str(error).replace("\n", " ")


@functools.cache
def _schema(kind: DocumentKind) -> dict[str, Any]:
    text = resources.files("atom.recipes").joinpath(kind.schema).read_text(encoding="utf-8")
    return cast("dict[str, Any]", json.loads(text))


@functools.cache
def _validator(kind: DocumentKind) -> jsonschema.Draft202012Validator:
    import jsonschema  # 0.2 s, which the capture process and `atom --help` can do without

    return jsonschema.Draft202012Validator(_schema(kind))


def _field_error(
    kind: DocumentKind, source: str, lines: dict[FieldPath, int], path: FieldPath, message: str
) -> UsageError:
    known = path
    while known not in lines:
        known = known[:-1]
    field = f"field `{_dotted(path)}` " if path else ""
    return UsageError(f"{kind.word} {source}, line {lines[known]}: {field}{message}")


def _dotted(path: FieldPath) -> str:
    return re.sub(r"\.\[", "[", ".".join(f"[{part}]" if isinstance(part, int) else part for part in path))


def _explain(kind: DocumentKind, error: jsonschema.ValidationError) -> tuple[FieldPath, str]:
    """The field at fault and what would be right for it."""
    path: FieldPath = tuple(error.absolute_path)
    schema = cast("dict[str, Any]", error.schema)
    instance = cast("Any", error.instance)
    if error.validator == "additionalProperties":
        known = list(schema.get("properties", {}))
        unknown = next(name for name in instance if name not in known)
        near = difflib.get_close_matches(unknown, known, 1)
        hint = f"did you mean `{near[0]}`?" if near else f"known here: {', '.join(known)}"
        return (*path, unknown), f"is unknown; {hint}"
    if error.validator == "required":
        missing = next(name for name in schema["required"] if name not in instance)
        return (*path, missing), f"is missing; it must be {_expected(kind, schema['properties'][missing])}"
    if error.validator == "pattern" and "propertyNames" in error.absolute_schema_path:
        return (*path, str(instance)), f"has a name that must match {schema['pattern']}"
    return path, f"is {_shown(instance)}; it must be {_expected(kind, schema)}"


def _expected(kind: DocumentKind, schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        schema = _schema(kind)["$defs"][schema["$ref"].rpartition("/")[2]]
    if "description" in schema:
        return str(schema["description"])
    return " or ".join(_types(schema)) or "of another form"


def _types(schema: dict[str, Any]) -> Iterator[str]:
    types = schema.get("type", [])
    for name in [types] if isinstance(types, str) else types:
        yield {"object": "a mapping", "array": "a list", "null": "null"}.get(name, f"a {name}")
    for choice in schema.get("anyOf", []):
        yield from _types(choice)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "…"
