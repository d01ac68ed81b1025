"""Arms that run in a container: the recipe of such an arm, derived from the one for this machine.

Its server is started by `docker run` (or podman, where there is no docker), with the checkout, the compile caches and
the comparison's directory mounted where they are here, so that every path in the command means the same inside. What it
must find in the image is the interpreter and the packages. Leftovers carry labels; `atom clean` sweeps them
(`recipes/containers.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml

from atom.bench.rundir import write_text
from atom.diag.compare.model import Arm, Half, Load
from atom.diag.gc_injection import hook_python_path
from atom.recipes.containers import OWNER_LABEL, RUN_LABEL, container_engine
from atom.recipes.cpus import format_cpus
from atom.recipes.errors import UsageError
from atom.recipes.processes import LABEL_VARIABLE, process_token
from atom.recipes.resolve import recipe_file
from atom.recipes.schema import read_recipe_file

__all__ = ["container_recipe", "with_image_id", "write_container_recipe"]

_PYTHON: Final = "python3"
"""Of the image: this machine's interpreter is not in there."""
_GRACE_S: Final = 30.0


def write_container_recipe(given: str, arm: Arm, load: Load, half: Half, *, out: Path) -> Path:
    """The recipe that starts `given`'s server in the arm's image on `half` for `load`, as a file below `out`."""
    path = out / "arms" / arm.label / f"recipe-{load.name}-{half.name}.yaml"
    value = container_recipe(given, arm, load, half, out=out, engine=container_engine())
    write_text(path, yaml.safe_dump(value, sort_keys=False, width=120))
    return path


def container_recipe(given: str, arm: Arm, load: Load, half: Half, *, out: Path, engine: str) -> dict[str, Any]:
    """As plain data. `engine`: `docker` or `podman`. UsageError for a recipe that has a prefix of its own."""
    assert arm.image is not None
    value = dict(read_recipe_file(recipe_file(given)).data)
    if value.get("exec"):
        raise UsageError(
            f"arm {arm.label}: recipe {given} has an `exec` of its own, and cannot be put into an image too"
        )
    for field in ("requires", "detached"):  # about this machine
        value.pop(field, None)
    variables = dict(value.get("variables", {}))
    if "python" not in arm.variables and arm.python is None:
        variables["python"] = _PYTHON
        value["variables"] = variables
    grace = float(value.get("stop", {}).get("grace", _GRACE_S))
    name = "atom-{label}"
    stop = f"{engine} stop -t {grace:.0f} {name} >/dev/null 2>&1; {engine} rm --force {name} >/dev/null 2>&1"
    words = [
        *(engine, "run", "--rm", "--init", "--name", name),
        *("--label", f"{RUN_LABEL}={{label}}", "--label", f"{OWNER_LABEL}={process_token()}"),
        *("--env", f"{LABEL_VARIABLE}={{label}}"),
        *("--network", "host", "--ipc", "host"),
        *(word for path in _mounts(arm, load, value, out) for word in ("--volume", f"{_braces(path)}:{_braces(path)}")),
        *_model_cache(),
        *("--volume", "{scratch}:{scratch}"),
        *_devices(half, engine),
        *(("--cpuset-cpus", format_cpus(half.server_cpus)) if half.server_cpus else ()),
        *(("--workdir", _braces(arm.checkout)) if arm.checkout is not None else ()),
        *("--entrypoint", "", _braces(arm.image), "{env}"),
    ]
    return {
        **value,
        "exec": words,
        "stop": {**value.get("stop", {}), "grace": grace + 5, "command": ["sh", "-c", stop]},
    }


def with_image_id(arm: Arm) -> Arm:
    """The arm with what its image's name stands for now in its provenance (`image_id`, and `image_digest` of one that a
    registry has): a tag may stand for another image tomorrow. As it is where the engine does not know the image yet."""
    if arm.image is None:
        return arm
    try:
        done = subprocess.run(
            [container_engine(), "image", "inspect", arm.image],
            capture_output=True, text=True, timeout=60, check=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        (found,) = json.loads(done.stdout)
        facts = {"image_id": str(found["Id"])}
        if digests := found.get("RepoDigests"):
            facts["image_digest"] = str(digests[0])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError, AttributeError, UsageError):
        return arm
    return replace(arm, provenance={**arm.provenance, **facts})


def _mounts(arm: Arm, load: Load, recipe: Mapping[str, Any], out: Path) -> list[str]:
    """Directories and files of this machine that the server's command and environment name."""
    if arm.cache is not None:
        Path(arm.cache).mkdir(parents=True, exist_ok=True)  # or the container engine makes it, as root
    named = [
        *arm.variables.values(),
        *load.server_args,
        *arm.server_args,
        load.options.get("model"),
        recipe.get("model"),
    ]
    paths = [arm.checkout, arm.src, arm.cache, str(out.absolute()), str(hook_python_path().resolve().parent)]
    paths += [one for one in named if isinstance(one, str) and Path(one).is_absolute() and Path(one).exists()]
    found: list[str] = []
    for path in sorted({path for path in paths if path is not None}):
        if ":" in path:
            raise UsageError(f"arm {arm.label}: {path} cannot be mounted into a container, for it has a colon")
        if not any(Path(path).is_relative_to(one) for one in found):
            found.append(path)
    return found


def _model_cache() -> list[str]:
    """Models that Hugging Face's library has downloaded here, and the key for more, which stands in no file."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface").absolute()
    if not home.is_dir() or ":" in str(home):
        return []
    words = ["--volume", f"{_braces(str(home))}:{_braces(str(home))}", "--env", f"HF_HOME={_braces(str(home))}"]
    return [*words, *(("--env", "HF_TOKEN") if "HF_TOKEN" in os.environ else ())]


def _devices(half: Half, engine: str) -> list[str]:
    """All GPUs of the machine: which of them the server uses is said by its environment, in this machine's numbers."""
    if half.devices is None:
        return []
    if Path("/dev/kfd").exists():
        return ["--device", "/dev/kfd", "--device", "/dev/dri", "--security-opt", "seccomp=unconfined"]
    return ["--gpus", "all"] if engine == "docker" else ["--device", "nvidia.com/gpu=all"]


def _braces(text: str) -> str:
    """A text that may have braces, as a recipe says it."""
    return text.replace("{", "{{").replace("}", "}}")
