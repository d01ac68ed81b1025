"""What a person types becomes an arm, or a line that says what would be right; and what an arm has before it starts."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atom.diag.compare.arms import arm_environment, prepare_arm, resolve_arm
from atom.diag.compare.confounds import confounded, factors, observed
from atom.diag.compare.model import Arm, ArmKind
from atom.diag.compare.origins import origin_problems
from atom.diag.compare.provenance import difference
from atom.recipes.errors import RunError, UsageError

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    (tmp_path / "gitconfig").write_text("[user]\nname = t\nemail = t@localhost\n[init]\ndefaultBranch = main\n")


@pytest.fixture
def hold() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def git(where: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(where), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def write(where: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        (where / name).write_text(text)


def commit(where: Path, files: dict[str, str], message: str = "a change") -> str:
    write(where, files)
    git(where, "add", "-A")
    git(where, "commit", "-qm", message)
    return git(where, "rev-parse", "HEAD")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """Two refs of a server in a package below a namespace, as this project's own is."""
    path = tmp_path / "project"
    path.mkdir()
    git(path, "init", "-q")
    files = {"src/spaced/server/__init__.py": "", "src/spaced/server/core.py": "SPEED = 1\n", "README": "r\n"}
    commit(path, files, "the first")
    git(path, "branch", "simulated")
    git(path, "checkout", "-qb", "branch")
    commit(path, {"src/spaced/server/core.py": "SPEED = 2\n", "src/spaced/server/more.py": "\n"}, "faster")
    git(path, "checkout", "-q", "main")
    return path


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    text = """
        name: small
        command: ["{python}", -m, spaced.server.core, --port, "{port}"]
        env: {PYTHONPATH: "{src}"}
        source: {path: src, packages: [spaced.server]}
    """
    path.write_text(textwrap.dedent(text))
    return str(path)


def edited(recipe: str, **changes: str) -> str:
    """Another recipe file in which texts are replaced."""
    text = Path(recipe).read_text()
    for name, change in changes.items():
        old, new = change.split(" => ")
        assert old in text
        text = text.replace(old, new)
        path = Path(recipe).with_name(f"{name}.yaml")
    path.write_text(text)
    return str(path)


# ---- what a spec is ------------------------------------------------------------------------------------------------


def test_refs(repo: Path, recipe: str) -> None:
    arm = resolve_arm("branch", role="head", repo=repo, recipe=recipe, env={"A": "1"}, server_args=["--x"])
    assert (arm.kind, arm.label, arm.role, arm.spec) == (ArmKind.REF, "branch", "head", "branch")
    assert (arm.src, arm.checkout, arm.recipe, arm.env, arm.server_args) == (None, None, recipe, {"A": "1"}, ("--x",))
    assert arm.provenance["sha"] == git(repo, "rev-parse", "branch")
    assert (arm.provenance["subject"], arm.provenance["dirty"]) == ("faster", False)
    assert Arm.from_dict(json.loads(json.dumps(arm.as_dict()))) == arm
    assert resolve_arm("fast=branch~1", role="head", repo=repo).label == "fast"
    assert resolve_arm("branch", role="head", repo=repo, taken=["branch"]).label == "branch-2"


@pytest.mark.parametrize("label", ["../../x", "", "-x", "a b", "é", "x" * 65])
def test_what_is_no_label_is_called_that(repo: Path, label: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_arm(f"{label}=main", role="base", repo=repo)
    assert str(caught.value).startswith(f"{label!r} is no label; one has letters, digits, ")


def test_a_ref_may_have_an_equals_sign(repo: Path) -> None:
    git(repo, "branch", "a/b=main")
    assert resolve_arm("a/b=main", role="base", repo=repo).provenance["ref"] == "a/b=main"
    with pytest.raises(UsageError, match="'a/b=gone'"):
        resolve_arm("a/b=gone", role="base", repo=repo)


def test_the_working_tree(repo: Path) -> None:
    write(repo, {"new": "untracked"})
    arm = resolve_arm(".", role="head", repo=repo)
    assert (arm.label, arm.provenance["dirty"], arm.provenance["ref"]) == ("worktree", True, "WORKTREE")
    assert arm.provenance["head"] == git(repo, "rev-parse", "main")


def test_recipes_urls_and_records(repo: Path, recipe: str, tmp_path: Path) -> None:
    def of(spec: str, **more: Any) -> Arm:
        return resolve_arm(spec, role="base", repo=repo, **more)

    assert (of("embedded").kind, of("embedded").recipe) == (ArmKind.RECIPE, "embedded")
    assert (of(recipe).label, of(f"recipe:{recipe}").recipe) == ("small", recipe)
    arm = of("http://127.0.0.1:8000/")
    assert (arm.kind, arm.label, arm.url) == (ArmKind.URL, "127.0.0.1-8000", "http://127.0.0.1:8000")
    assert of("a=url:https://host/v").url == "https://host/v"
    write(tmp_path, {f"arms/x/run-{n}/run.json": "{}" for n in (10, 9)} | {"result.json": "{}"})
    runs = of(str(tmp_path / "arms/x"))
    assert runs.kind is ArmKind.RECORDED
    assert [Path(one).name for one in runs.recorded] == ["run-9", "run-10"]
    several = of(f"old=run:{tmp_path / 'arms/x/run-9'},{tmp_path / 'result.json'}")
    assert (several.label, len(several.recorded)) == ("old", 2)


def test_a_name_of_two_things_is_refused_with_how_to_say_which(repo: Path) -> None:
    with pytest.raises(UsageError, match=r"is a ref of .* and a recipe: write ref:simulated or recipe:simulated"):
        resolve_arm("simulated", role="base", repo=repo)
    assert resolve_arm("ref:simulated", role="base", repo=repo).kind is ArmKind.REF
    assert resolve_arm("x=recipe:simulated", role="base", repo=repo).kind is ArmKind.RECIPE


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mian", r"'mian' is no ref of .*; it has .*main.*; nor is it a recipe \(.*embedded"),
        ("ref:", "is no ref"),
        ("ref:simulate", "'simulate' is no ref of"),
        ("recipe:main", "no recipe 'main'; there are"),
        ("no.yaml", "no such recipe file"),
        ("url:ftp://x", "must look like http://HOST:PORT"),
        ("http://x:99999", "must look like http://HOST:PORT"),
        ("http://user:pw@x", "must not hold a user or password; give the key with OPENAI_API_KEY"),
        ("run:/", "is no run directory"),
        ("/", "is no run directory"),
        ("-x", "is no ref"),
        ("a=", "is no ref"),
    ],
)
def test_what_is_nothing_says_what_would_be_something(repo: Path, spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        resolve_arm(spec, role="base", repo=repo)
    assert "\n" not in str(caught.value)
    assert "pw" not in str(caught.value)


def test_without_a_repository(tmp_path: Path) -> None:
    assert resolve_arm("embedded", role="base", repo=tmp_path).kind is ArmKind.RECIPE
    with pytest.raises(UsageError, match=r"'main' is no recipe .* and no ref: .*not a git repository"):
        resolve_arm("main", role="base", repo=tmp_path)


def test_labels_are_unique_and_what_cannot_be_changed_is_refused(repo: Path) -> None:
    with pytest.raises(UsageError, match="another arm is called a already"):
        resolve_arm("a=main", role="head", repo=repo, taken=["a"])
    with pytest.raises(UsageError, match="a server that runs already: its env cannot be chosen"):
        resolve_arm("http://x", role="head", env={"A": "1"})


def test_a_recipe_must_take_the_ref(repo: Path, recipe: str) -> None:
    other = edited(recipe, without='env: {PYTHONPATH: "{src}"} => env: {}')
    with pytest.raises(UsageError, match=r"recipe small has no \{src\} in any field"):
        resolve_arm("main", role="base", repo=repo, recipe=other)
    with pytest.raises(UsageError, match="has no such variable"):
        resolve_arm("main", role="base", repo=repo, recipe=recipe, variables={"x": "1"})


# ---- before it starts ----------------------------------------------------------------------------------------------


def test_a_ref_is_prepared(repo: Path, recipe: str, hold: contextlib.ExitStack) -> None:
    arm = prepare_arm(resolve_arm("branch", role="head", repo=repo), recipes=[recipe], hold=hold)
    assert arm.checkout is not None
    assert arm.src == f"{arm.checkout}/src"
    assert (Path(arm.src) / "spaced/server/core.py").read_text() == "SPEED = 2\n"
    assert arm.provenance["packages"]["pytest"] == pytest.__version__
    env = arm_environment(arm)
    assert env["ATOM_PREPARED_SOURCE"] == arm.src
    assert env["TRITON_CACHE_DIR"].startswith(f"{Path(arm.checkout).parent}/caches/")
    assert Arm.from_dict(json.loads(json.dumps(arm.as_dict()))) == arm
    other = resolve_arm("branch", role="head", repo=repo, server_args=["--other"])
    assert prepare_arm(other, recipes=[recipe], hold=hold).cache != arm.cache
    with pytest.raises(UsageError, match="needs a recipe"):
        prepare_arm(other, recipes=[], hold=hold)


def test_prepare_of_the_recipe_runs_in_the_checkout(repo: Path, recipe: str, hold: contextlib.ExitStack) -> None:
    steps = 'name: small => name: small\\nprepare: [[sh, -c, "echo $PYTHONPATH $A > {src}/built"]]'
    building = edited(recipe, building=steps.replace("\\n", "\n"))
    arm = resolve_arm("branch", role="head", repo=repo, env={"A": "1"})
    ready = prepare_arm(arm, recipes=[building], hold=hold)
    assert (Path(ready.src or "") / "built").read_text() == f"{ready.src} 1\n"
    assert prepare_arm(arm, recipes=[building], hold=hold).checkout == ready.checkout
    plain = prepare_arm(arm, recipes=[recipe], hold=hold)
    assert plain.checkout != ready.checkout
    assert not (Path(plain.src or "") / "built").exists()


def test_prepare_of_an_image_runs_in_it(
    repo: Path, recipe: str, hold: contextlib.ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"bin/docker": f'#!/bin/sh\nfor word; do echo "$word"; done > {tmp_path}/asked\n'})
    (tmp_path / "bin/docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    steps = 'name: small => name: small\nprepare: [["{python}", setup.py, build]]'
    building = edited(recipe, building=steps.replace("\\n", "\n"))
    arm = resolve_arm("branch", role="head", repo=repo, image="i:1", env={"A": "1"})
    ready = prepare_arm(arm, recipes=[building], hold=hold)
    words = (tmp_path / "asked").read_text().splitlines()
    assert words[-7:] == ["i:1", "env", f"PYTHONPATH={ready.src}", "A=1", "python3", "setup.py", "build"]
    assert f"{ready.checkout}:{ready.checkout}" in words
    (tmp_path / "asked").unlink()
    assert prepare_arm(arm, recipes=[building], hold=hold).checkout == ready.checkout
    assert not (tmp_path / "asked").exists()


def test_recipes_that_disagree(repo: Path, recipe: str, hold: contextlib.ExitStack) -> None:
    top = edited(recipe, top="path: src => path: .")
    arm = resolve_arm("branch", role="head", repo=repo)
    with pytest.raises(UsageError, match=r"disagree on `source.path` \(., src\)"):
        prepare_arm(arm, recipes=[recipe, top], hold=hold)
    missing = edited(recipe, missing="path: src => path: lib")
    with pytest.raises(RunError, match="has no directory lib"):
        prepare_arm(arm, recipes=[missing], hold=hold)


# ---- whose modules -------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The same project somewhere else."""
    path = tmp_path / "installed"
    files = {f"spaced/server/{name}.py": "" for name in ("core", "only_here")}
    write(path, files)
    return path


@pytest.fixture
def both(recipe: str, installed: Path) -> str:
    """A recipe whose interpreter finds that too, after the checkout, as if it were installed."""
    return edited(recipe, both=f'"{{src}}" => "{{src}}:{installed}"')


def test_a_module_that_the_ref_lacks_is_not_taken_from_elsewhere(
    repo: Path, both: str, hold: contextlib.ExitStack
) -> None:
    arm = resolve_arm("branch", role="head", repo=repo)
    prepare_arm(arm, recipes=[both], hold=hold)  # a regular package: nothing is added to it from elsewhere
    git(repo, "rm", "-q", "src/spaced/server/__init__.py")
    git(repo, "commit", "-qm", "a namespace")
    arm = resolve_arm("main", role="head", repo=repo)
    foreign = r"^module spaced.server.only_here comes from .*/installed/.*, and not from .*; recipe small must find"
    with pytest.raises(RunError, match=foreign):
        prepare_arm(arm, recipes=[both], hold=hold)


def test_a_package_that_the_ref_lacks_is_not_taken_from_elsewhere(
    repo: Path, recipe: str, both: str, hold: contextlib.ExitStack
) -> None:
    git(repo, "mv", "src/spaced/server", "src/spaced/renamed")
    git(repo, "commit", "-qm", "renamed")
    arm = resolve_arm("main", role="head", repo=repo)
    with pytest.raises(RunError, match=r"module spaced.server.core comes from .*/installed/"):
        prepare_arm(arm, recipes=[both], hold=hold)
    with pytest.raises(RunError, match=r"spaced.server is not in .*/src: main has no such package there"):
        prepare_arm(arm, recipes=[recipe], hold=hold)


def test_a_regular_package_elsewhere_hides_the_checkout(
    repo: Path, both: str, installed: Path, hold: contextlib.ExitStack
) -> None:
    write(installed, {"spaced/__init__.py": "", "spaced/server/__init__.py": ""})
    # The checkout comes first on the path, but a namespace package yields to a regular one wherever that is.
    with pytest.raises(RunError, match=r"module spaced.server comes from .*/installed/"):
        prepare_arm(resolve_arm("branch", role="head", repo=repo), recipes=[both], hold=hold)


def test_the_current_directory_comes_first(
    repo: Path, recipe: str, installed: Path, hold: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(installed, {"spaced/server/__init__.py": ""})
    monkeypatch.chdir(installed)  # `python -m` looks there before PYTHONPATH
    advice = r"module spaced.server comes from .*/installed/.*: start this elsewhere, or give recipe small `env: \{P"
    with pytest.raises(RunError, match=advice):
        prepare_arm(resolve_arm("branch", role="head", repo=repo), recipes=[recipe], hold=hold)
    safe = edited(recipe, safe='"{src}" => "{src}", PYTHONSAFEPATH: "1"')
    prepare_arm(resolve_arm("branch", role="head", repo=repo), recipes=[safe], hold=hold)


def test_a_link_out_of_the_checkout_is_foreign(
    repo: Path, recipe: str, installed: Path, hold: contextlib.ExitStack
) -> None:
    (repo / "src/spaced/server/linked.py").symlink_to(installed / "spaced/server/core.py")
    with pytest.raises(RunError, match=r"module spaced.server.linked comes from .*/installed/"):
        prepare_arm(resolve_arm(".", role="head", repo=repo), recipes=[recipe], hold=hold)


def test_what_the_processes_of_a_run_loaded(
    repo: Path, recipe: str, installed: Path, hold: contextlib.ExitStack, tmp_path: Path
) -> None:
    arm = prepare_arm(resolve_arm("branch", role="head", repo=repo, recipe=recipe), recipes=[], hold=hold)
    (problem,) = origin_problems(tmp_path, arm)
    assert problem.startswith("source not proven: no process of the server recorded where spaced.server came from")
    record = {"pid": 7, "role": "core", "modules": {"spaced.server.core": f"{arm.src}/spaced/server/core.py"}}
    write(tmp_path, {"server/origins-core-7.json": json.dumps(record)})
    assert origin_problems(tmp_path, arm) == []
    record["modules"] |= {"spaced.server.only_here": f"{installed}/spaced/server/only_here.py"}  # type: ignore[operator]
    write(tmp_path, {"server/origins-core-7.json": json.dumps(record), "server/origins-api-8.json": "{"})
    (problem,) = origin_problems(tmp_path, arm)
    known = "foreign modules: in the core process 7 module spaced.server.only_here comes from"
    assert problem.startswith(f"{known} {installed}/")


def test_the_hook_records_where_modules_come_from(tmp_path: Path) -> None:
    from atom.diag.gc_injection import hook_environment, hook_python_path
    from atom.recipes.recipe import Roles

    write(tmp_path, {"pkg/__init__.py": "", "pkg/early.py": "", "pkg/late.py": "", "pkgother.py": ""})
    write(tmp_path, {"pkg/main.py": "import pkg.early, pkgother, os\nif os.fork() == 0:\n    import pkg.late\n"})
    env = {
        **hook_environment(tmp_path, Roles(api=("pkg.main",)), packages=["pkg"]),
        "PYTHONPATH": f"{hook_python_path()}:{tmp_path}",
    }
    subprocess.run([sys.executable, "-m", "pkg.main"], env={**os.environ, **env}, check=True, cwd=tmp_path)
    records = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("origins-api-*.json"))]
    names = sorted(sorted(record["modules"]) for record in records)
    assert names == [["pkg", "pkg.early", "pkg.late", "pkg.main"], ["pkg", "pkg.early", "pkg.main"]]
    assert records[0]["modules"]["pkg.early"] == str(tmp_path / "pkg/early.py")
    assert list(tmp_path.glob("*.new")) == []


@pytest.mark.parametrize("name", ["embedded", "simulated"])
def test_this_projects_own_refs_just_work(name: str, hold: contextlib.ExitStack) -> None:
    """As they are: `.src` is a farm of links, and the running tool is on the path as well."""
    if not (ROOT / ".git").exists():
        pytest.skip("not run from a checkout")
    arm = prepare_arm(resolve_arm(".", role="head", repo=ROOT, recipe=name), recipes=[], hold=hold)
    assert arm.src == f"{arm.checkout}/.src"
    assert (Path(arm.src) / "atom/engine/__init__.py").is_file()


# ---- what lies between -----------------------------------------------------------------------------------------------


def ref(repo: Path, spec: str, **more: Any) -> Arm:
    return resolve_arm(spec, role="arm", repo=repo, **more)


def test_the_difference_of_two_refs(repo: Path) -> None:
    found = difference(ref(repo, "main"), ref(repo, "branch"))
    assert (found["merge_base"], found["commits_only_in_base"], found["commits_only_in_head"]) == (
        git(repo, "rev-parse", "main"), 0, 1,
    )  # fmt: skip
    assert found["changed_files"] == [
        {"path": "src/spaced/server/core.py", "added": 1, "deleted": 1},
        {"path": "src/spaced/server/more.py", "added": 1, "deleted": 0},
    ]
    assert len(found["patch_id"]) == 40
    assert found["shown"]["commits"].startswith("1 in the head, 0 in the base since merge base")
    assert "branch_patch_id" not in found
    json.dumps(found)


def test_a_working_tree_is_no_commit_of_the_head(repo: Path) -> None:
    (repo / "src/spaced/server/core.py").write_text("changed = True\n")
    found = difference(ref(repo, "main"), ref(repo, "."))
    ahead = int(git(repo, "rev-list", "--count", "main..HEAD"))
    assert (found["commits_only_in_base"], found["commits_only_in_head"]) == (0, ahead)
    told = f"{ahead} in the head and changes that are not committed, 0 in the base since merge base"
    assert found["shown"]["commits"].startswith(told)
    assert found["changed_files"]


def test_the_patch_id_is_the_changes_own(repo: Path) -> None:
    before = difference(ref(repo, "main"), ref(repo, "branch"))["patch_id"]
    git(repo, "config", "diff.noprefix", "true")
    git(repo, "config", "diff.algorithm", "patience")
    git(repo, "config", "diff.context", "0")
    assert difference(ref(repo, "main"), ref(repo, "branch"))["patch_id"] == before
    commit(repo, {"README": "moved on\n"})
    found = difference(ref(repo, "main"), ref(repo, "branch"))
    assert found["patch_id"] != before  # it takes back what the base has more
    assert found["branch_patch_id"] == before
    assert "rebase" in found["shown"]["note"]
    git(repo, "checkout", "-q", "branch")
    git(repo, "rebase", "-q", "main")
    assert difference(ref(repo, "main"), ref(repo, "branch"))["patch_id"] == before


def test_the_difference_of_a_working_tree(repo: Path) -> None:
    write(repo, {"new": "1\n2\n"})
    found = difference(ref(repo, "main"), ref(repo, "."))
    assert found["changed_files"] == [{"path": "new", "added": 2, "deleted": 0}]
    assert difference(ref(repo, "main"), ref(repo, "main~0"))["shown"]["commits"].startswith("the same one")


def test_histories_without_anything_in_common(repo: Path) -> None:
    git(repo, "checkout", "-q", "--orphan", "other")
    commit(repo, {"x": "x"})
    found = difference(ref(repo, "main"), ref(repo, "other"))
    assert found["merge_base"] is None
    assert "nothing in common" in found["shown"]["commits"]


# ---- confounded ------------------------------------------------------------------------------------------------------


def test_two_refs_alone_are_one_factor(repo: Path) -> None:
    assert confounded(ref(repo, "main"), ref(repo, "branch")) == []
    assert [one.name for one in factors(ref(repo, "main"), ref(repo, "branch"))] == ["source"]
    assert factors(ref(repo, "main"), ref(repo, "main")) == []


def test_whatever_else_differs_between_refs_confounds(repo: Path, recipe: str) -> None:
    base = ref(repo, "main", recipe=recipe, env={"SAME": "1", "MY_TOKEN": "abc"}, server_args=["--n", "1"])
    other = edited(recipe, other="spaced.server.core => spaced.server.core, --eager")
    more = {"server_args": ["--n", "2"], "image": "i:1", "python": "/x/python"}
    head = ref(repo, "branch", recipe=other, env={"SAME": "1", "MY_TOKEN": "xyz", "NEW": ""}, **more)
    assert confounded(base, head) == [
        "command --eager: not given / --eager",
        "env MY_TOKEN: <redacted> / <redacted>",
        "env NEW: unset / ",
        "server argument --n: --n 1 / --n 2",
        "image: – / i:1",
    ]


def test_the_same_source_in_two_ways_is_one_factor_too(repo: Path) -> None:
    base, head = ref(repo, "main"), ref(repo, "main", env={"A": "1"})
    assert [one.text for one in factors(base, head)] == ["unset / 1"]
    assert confounded(base, head) == []
    assert len(confounded(base, ref(repo, "main", env={"A": "1"}, server_args=["--eager"]))) == 2


def test_two_recipes(recipe: str) -> None:
    def of(path: str) -> Arm:
        return resolve_arm(path, role="arm")

    one = edited(recipe, one="core, => core, --block-size, 16,")
    two = edited(one, two="16 => 32")
    assert confounded(of(one), of(two)) == []
    assert [str(factor.text) for factor in factors(of(one), of(two))] == ["--block-size 16 / --block-size 32"]
    three = edited(two, three='env: {PYTHONPATH: "{src}"} => env: {PYTHONPATH: "{src}", NEW: 1}')
    assert confounded(of(one), of(three)) == [
        "command --block-size: --block-size 16 / --block-size 32",
        "recipe env NEW: unset / 1",
    ]
    # Another program is what is compared, with all that belongs to it.
    assert confounded(of("embedded"), of(recipe)) == []
    assert [factor.name for factor in factors(of("embedded"), of(recipe))] == ["server"]


def test_packages_and_what_the_runs_show(repo: Path, tmp_path: Path) -> None:
    import dataclasses

    base, head = ref(repo, "main"), ref(repo, "branch")
    with_packages = [
        dataclasses.replace(arm, provenance={**arm.provenance, "interpreter": "/p (3.11)", "packages": packages})
        for arm, packages in ((base, {"torch": "2.6", "x": "1"}), (head, {"torch": "2.7", "x": "1"}))
    ]
    assert confounded(*with_packages) == ["python: torch 2.6 / 2.7"]
    runs = []
    for number, devices in enumerate((["H200, GPU-1"], ["H100, GPU-2"])):
        run = {"host": {"name": "h"}, "devices": devices, "load": {"model": "m", "seed": 1, "base_url": str(number)}}
        write(tmp_path, {f"{number}/run.json": json.dumps(run), f"{number}-bad/run.json": "[]"})
        runs.append(tmp_path / str(number))
    seen = observed([(runs[0], runs[1]), (runs[0], tmp_path / "1-bad"), (runs[0], runs[0])])
    assert confounded(base, head, None, seen) == ["devices: H200 / H100"]
    assert observed([(runs[0], runs[0]), (tmp_path / "0-bad", runs[1]), (tmp_path / "none", runs[1])]) == []


def test_loads_that_differ_within_matched_runs_confound_them(tmp_path: Path) -> None:
    """Also where the runs of one arm differ from each other in the same way."""
    for name, (length, limit) in {"a-1": (64, 4), "a-2": (128, 4), "b-1": (64, 4), "b-2": (256, 4)}.items():
        load = {"max_concurrency": limit, "nonce": name, "source": {"random_input_len": length}}
        write(tmp_path, {f"{name}/run.json": json.dumps({"load": load})})
    matched = [(tmp_path / f"a-{n}", tmp_path / f"b-{n}") for n in (1, 2)]
    assert [(one.name, one.text) for one in observed(matched)] == [("load random input len", "128 / 256")]
    assert observed([matched[0], matched[0]]) == []


def test_a_pipe_in_the_place_of_a_record_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.json")
    assert observed([(tmp_path, tmp_path)]) == []
