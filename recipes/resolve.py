"""Finding recipes: the built-in ones by name, any other by path.

`resolve_recipe("embedded")` and `resolve_recipe("path/to/file.yaml")` both return a checked `Recipe`.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from atom.recipes.errors import UsageError
from atom.recipes.placeholders import check_placeholders
from atom.recipes.recipe import Recipe, recipe_from_document
from atom.recipes.schema import read_recipe_file

__all__ = ["builtin_recipes", "load_recipe", "recipe_file", "resolve_recipe"]


def load_recipe(path: str | Path) -> Recipe:
    """Read and check one recipe file; UsageError names file, line, field and what would be right."""
    document = read_recipe_file(Path(path))
    recipe = recipe_from_document(document)
    check_placeholders(recipe, document)
    return recipe


def builtin_recipes() -> dict[str, Path]:
    """Name to file of the recipes that come with the package."""
    folder = Path(str(resources.files("atom.recipes")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def resolve_recipe(name_or_path: str) -> Recipe:
    """A built-in recipe by its name, or a recipe file by its path."""
    return load_recipe(recipe_file(name_or_path))


def recipe_file(name_or_path: str) -> Path:
    """Where `resolve_recipe` reads it; UsageError for a name that there is not."""
    builtin = builtin_recipes()
    if name_or_path in builtin:
        return builtin[name_or_path]
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        return Path(name_or_path)
    raise UsageError(f"no recipe {name_or_path!r}; there are {', '.join(builtin)}, or give the path of a .yaml file")
