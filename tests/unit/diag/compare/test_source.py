"""Checkouts of git refs, with real repositories: what they are, and that the user's repository stays as it was."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from atom.diag.compare import source
from atom.diag.compare.git import Repository, open_repository
from atom.diag.compare.source import Changed, Checkout, checkout, put_back, stale_checkouts, sweep_checkouts
from atom.recipes.errors import RunError, UsageError
from atom.recipes.spawn import import_root

Git = Callable[..., str]
ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    (tmp_path / "gitconfig").write_text(
        '[user]\nname = t\nemail = t@localhost\n[init]\ndefaultBranch = main\n[protocol "file"]\nallow = always\n'
    )
    return tmp_path / "cache" / "atom"


def git(where: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(where), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def commit(where: Path, **files: str) -> str:
    for name, text in files.items():
        (where / name).write_text(text)
    git(where, "add", "-A")
    git(where, "commit", "-qm", "-".join(files) or "empty", "--allow-empty")
    return git(where, "rev-parse", "HEAD")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    path = tmp_path / "user repo: ä"
    path.mkdir()
    git(path, "init", "-q")
    commit(path, a="one\n", b="same\n")
    git(path, "branch", "old")
    commit(path, a="two\n")
    return path


def state(repo: Path) -> Mapping[str, str]:
    """Every file of the repository and its working tree, by content."""
    return {
        str(path.relative_to(repo)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(repo.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def checked_out(repository: Repository, ref: str) -> Checkout:
    return checkout(repository, repository.resolve(ref).sha)


def test_a_ref_gets_a_checkout_of_its_own_and_the_second_time_the_same_one(repo: Path) -> None:
    (repo / "a").write_text("not committed\n")
    before, worktrees = state(repo), git(repo, "worktree", "list")
    repository = open_repository(repo)
    with checked_out(repository, "old") as old, checked_out(repository, "main") as new:
        assert (old.tree / "a").read_text() == "one\n"
        assert (new.tree / "a").read_text() == "two\n"
        assert git(new.tree, "status", "--porcelain") == ""
        assert git(new.tree, "rev-parse", "HEAD") == git(repo, "rev-parse", "main")
        assert old.made
    with checked_out(repository, "old") as again:
        assert (again.made, again.tree) == (False, old.tree)
    assert state(repo) == before
    assert git(repo, "worktree", "list") == worktrees


def test_the_working_tree_as_it_is(repo: Path) -> None:
    (repo / ".gitignore").write_text("ignored\n")
    (repo / "ignored").write_text("x")
    (repo / "new file").write_text("untracked\n")
    (repo / "a").write_text("changed\n")
    (repo / "b").unlink()
    git(repo, "add", "a")
    (repo / "a").write_text("changed after it was staged\n")
    (repo / "link").symlink_to("a")
    before = state(repo)
    repository = open_repository(repo)
    found = repository.resolve(".")
    assert found.dirty
    assert found.head == git(repo, "rev-parse", "HEAD")
    with checkout(repository, found.sha) as made:
        names = sorted(path.name for path in made.tree.iterdir() if path.name != ".git")
        assert names == [".gitignore", "a", "link", "new file"]
        assert (made.tree / "a").read_text() == "changed after it was staged\n"
        assert git(made.tree, "rev-parse", "HEAD^") == found.head
    assert repository.resolve("WORKTREE").sha == found.sha  # the same content is the same commit
    assert state(repo) == before
    (repo / "a").write_text("changed once more\n")
    assert repository.resolve(".").sha != found.sha


def test_a_clean_working_tree_is_what_is_checked_out(repo: Path) -> None:
    found = open_repository(repo).resolve(".")
    assert (found.sha, found.dirty) == (git(repo, "rev-parse", "HEAD"), False)


def test_a_split_index_and_variables_of_a_hook_do_not_matter(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(repo, "config", "core.splitIndex", "true")
    commit(repo, c="c\n")
    (repo / "d").write_text("d\n")
    before = state(repo)
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    monkeypatch.setenv("GIT_INDEX_FILE", "/nowhere/index")
    repository = open_repository(repo)
    with checked_out(repository, ".") as made:
        assert (made.tree / "d").read_text() == "d\n"
    monkeypatch.undo()
    assert state(repo) == before


def test_hooks_of_the_user_do_not_run(repo: Path, tmp_path: Path) -> None:
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in ("post-checkout", "post-index-change", "reference-transaction"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch '{tmp_path}/ran'\n")
        (hooks / name).chmod(0o755)
    git(repo, "config", "--global", "core.hooksPath", str(hooks))
    (repo / "a").write_text("changed\n")
    with checked_out(open_repository(repo), "."):
        pass
    assert not (tmp_path / "ran").exists()


def test_a_linked_worktree_and_a_subdirectory_are_their_repository(repo: Path, tmp_path: Path) -> None:
    git(repo, "worktree", "add", "-q", str(tmp_path / "linked"), "old")
    (tmp_path / "linked" / "sub").mkdir()
    (tmp_path / "linked" / "sub" / "e").write_text("e\n")
    repository = open_repository(tmp_path / "linked" / "sub")
    assert repository.path == tmp_path / "linked"
    assert repository.common == (repo / ".git").resolve()
    with checked_out(repository, ".") as made:
        assert (made.tree / "a").read_text() == "one\n"
        assert (made.tree / "sub" / "e").exists()


def test_tags_are_there_for_builds_that_ask_for_them(repo: Path) -> None:
    git(repo, "tag", "-a", "v1.2", "-m", "release")
    with checked_out(open_repository(repo), "main") as made:
        assert git(made.tree, "describe", "--tags") == "v1.2"


def test_a_shallow_clone_has_what_it_has(repo: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{repo}", "shallow")
    repository = open_repository(tmp_path / "shallow")
    assert repository.shallow
    with checked_out(repository, "main") as made:
        assert (made.tree / "a").read_text() == "two\n"
        assert git(made.tree, "rev-list", "--count", "HEAD") == "1"
    with pytest.raises(UsageError, match=r"'old' is no ref of .*shallow clone.*git fetch origin old"):
        repository.resolve("old")


def test_a_partial_clone_fetches_what_it_lacks(repo: Path, tmp_path: Path) -> None:
    git(repo, "config", "uploadpack.allowFilter", "true")
    git(repo, "config", "uploadpack.allowAnySHA1InWant", "true")
    git(tmp_path, "clone", "-q", "--filter=blob:none", "--no-checkout", f"file://{repo}", "partial")
    with checked_out(open_repository(tmp_path / "partial"), "origin/old") as made:
        assert (made.tree / "a").read_text() == "one\n"


def test_objects_that_are_gone_make_no_checkout(repo: Path) -> None:
    blob = git(repo, "rev-parse", "HEAD:a")
    (repo / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    with pytest.raises(RunError, match="the checkout in"):
        checked_out(open_repository(repo), "main")
    assert stale_checkouts(unused=True) == []


def test_a_bare_repository_has_refs_and_no_working_tree(repo: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--bare", str(repo), "bare.git")
    repository = open_repository(tmp_path / "bare.git")
    assert repository.bare
    with checked_out(repository, "old") as made:
        assert (made.tree / "a").read_text() == "one\n"
    with pytest.raises(UsageError, match="bare repository: it has no working tree"):
        repository.resolve(".")


def test_a_repository_without_commits_has_only_its_working_tree(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.mkdir()
    git(path, "init", "-q")
    (path / "a").write_text("first\n")
    repository = open_repository(path)
    with pytest.raises(UsageError, match=r"'main' is no ref of .*no commits yet"):
        repository.resolve("main")
    found = repository.resolve(".")
    assert (found.dirty, found.head) == (True, None)
    with checkout(repository, found.sha) as made:
        assert (made.tree / "a").read_text() == "first\n"
    assert git(path, "count-objects").startswith("0 objects")


@pytest.mark.parametrize("format", ["sha1", "sha256"])
def test_both_kinds_of_object_names(tmp_path: Path, format: str) -> None:
    path = tmp_path / "repo"
    path.mkdir()
    git(path, "init", "-q", f"--object-format={format}")
    commit(path, a="a\n")
    (path / "a").write_text("b\n")
    with checked_out(open_repository(path), ".") as made:
        assert (made.tree / "a").read_text() == "b\n"


def test_refs_that_mean_nothing_or_two_things(repo: Path) -> None:
    repository = open_repository(repo)
    for ref in ("", "--help", "-x", "mian", "old:a", "a\nb"):
        with pytest.raises(UsageError, match="is no ref of"):
            repository.resolve(ref)
    git(repo, "tag", "old")  # of another commit than the branch
    with pytest.raises(UsageError, match=r"a branch and a tag.*write heads/old or tags/old"):
        repository.resolve("old")
    assert repository.resolve("heads/old").sha == git(repo, "rev-parse", "refs/heads/old")


def test_a_branch_of_the_only_remote_is_found_and_said(repo: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", str(repo), "clone")
    found = open_repository(tmp_path / "clone").resolve("old")
    assert found.ref == "origin/old"
    assert found.note == "old is no branch here; origin/old is taken"


def test_what_is_no_repository(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such directory"):
        open_repository(tmp_path / "nothing")
    with pytest.raises(UsageError, match="not a git repository"):
        open_repository(tmp_path)


def test_too_much_untracked_is_an_accident(repo: Path) -> None:
    with (repo / "huge").open("wb") as file:
        file.truncate(2 << 30)
    with pytest.raises(UsageError, match=r"the largest huge \(2048 MiB\); put them into .gitignore"):
        open_repository(repo).resolve(".")


def test_submodules_are_named(repo: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", str(repo), "other")
    git(repo, "submodule", "--quiet", "add", str(tmp_path / "other"), "third_party/x")
    sha = commit(repo)
    assert open_repository(repo).submodules(sha) == ["third_party/x"]
    with checkout(open_repository(repo), sha) as made:
        assert list((made.tree / "third_party/x").iterdir()) == []


# ---- preparing -----------------------------------------------------------------------------------------------------


def command(script: str) -> source.Prepare:
    return lambda tree: [([sys.executable, "-c", script, str(tree)], dict(os.environ))]


def test_prepare_runs_once_per_variant(repo: Path) -> None:
    repository, sha = open_repository(repo), git(repo, "rev-parse", "HEAD")
    prepare = command("open('built', 'a').write('x')")
    for variant, made in (("one", True), ("one", False), ("two", True)):
        with checkout(repository, sha, prepare=prepare, variant=variant) as found:
            assert found.made is made
            assert (found.tree / "built").read_text() == "x"


def test_a_prepare_that_fails_says_why_and_is_tried_again(repo: Path) -> None:
    repository, sha = open_repository(repo), git(repo, "rev-parse", "HEAD")
    with pytest.raises(RunError, match=r"(?s)prepare\[0\].*exit status 3.*prepare-0\.log.*no compiler here"):
        checkout(repository, sha, prepare=command("print('no compiler here'); raise SystemExit(3)"), variant="v")
    (stale,) = stale_checkouts()
    assert "no compiler here" in (stale.path / "prepare-0.log").read_text()
    with checkout(repository, sha, prepare=command("open('built', 'w')"), variant="v") as found:
        assert (found.tree / "built").exists()
    assert stale_checkouts() == []
    with pytest.raises(RunError, match="cannot run /no/such/program"):
        checkout(repository, sha, prepare=lambda _: [(["/no/such/program"], {})], variant="w")


# ---- the cache -----------------------------------------------------------------------------------------------------

SCRIPT = textwrap.dedent(
    """
    import os, sys
    from pathlib import Path
    from atom.diag.compare.git import open_repository
    from atom.diag.compare.source import checkout

    repo, sha, script = sys.argv[1:]
    prepare = lambda tree: [([sys.executable, "-c", script], dict(os.environ))]
    with checkout(open_repository(Path(repo)), sha, prepare=prepare, variant="v", note=print) as found:
        print("made" if found.made else "found", found.tree, flush=True)
        sys.stdin.read()
    """
)


def start(repo: Path, sha: str, script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", "-c", SCRIPT, str(repo), sha, script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(import_root())},
    )


def lines_until(process: subprocess.Popen[str], *words: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(words):
            return line
    raise AssertionError(f"it ended without saying {words}")


def test_two_processes_that_want_the_same_checkout_make_it_once(repo: Path, tmp_path: Path) -> None:
    sha = git(repo, "rev-parse", "HEAD")
    script = f"open({str(tmp_path / 'count')!r}, 'a').write('x')"
    processes = [start(repo, sha, script) for _ in range(2)]
    try:
        said = [lines_until(process, "made", "found").split() for process in processes]
        assert sorted(words[0] for words in said) == ["found", "made"]
        assert said[0][1:] == said[1][1:]
        assert (tmp_path / "count").read_text() == "x"
        assert stale_checkouts(unused=True) == []  # both have it in use
    finally:
        for process in processes:
            process.communicate("")
    assert len(stale_checkouts(unused=True)) == 1


def test_one_that_is_killed_half_way_is_made_again(repo: Path, tmp_path: Path) -> None:
    sha = git(repo, "rev-parse", "HEAD")
    fifo = tmp_path / "began"
    os.mkfifo(fifo)
    script = f"open('half', 'w'); open({str(fifo)!r}, 'w').close(); import time; time.sleep(600)"
    process = start(repo, sha, script)
    with fifo.open():  # it is preparing
        pass
    assert stale_checkouts() == []  # half made, but not abandoned
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (stale,) = stale_checkouts()
    assert stale.half_made
    with checkout(open_repository(repo), sha, prepare=command("open('whole', 'w')"), variant="v") as found:
        assert found.made
        assert found.entry == stale.path
        assert not (found.tree / "half").exists()
    assert stale_checkouts() == []


def test_abandoned_ones_are_swept_and_used_ones_are_not(repo: Path) -> None:
    repository, sha = open_repository(repo), git(repo, "rev-parse", "HEAD")
    with contextlib.suppress(RunError):
        checkout(repository, sha, prepare=command("raise SystemExit(1)"), variant="v")
    with checkout(repository, sha) as used:
        swept = sweep_checkouts(stale_checkouts(unused=True))
        assert [one.half_made for one in swept] == [True]
        assert used.tree.is_dir()
    (unused,) = stale_checkouts(unused=True)
    assert sweep_checkouts([unused]) == [unused]
    assert list(used.entry.parent.iterdir()) == []


def test_the_least_recently_used_go_and_the_used_stay(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "KEPT", 2)
    repository, sha = open_repository(repo), git(repo, "rev-parse", "HEAD")
    variants = [checkout(repository, sha, prepare=command(""), variant=str(n)) for n in range(2)]
    for age, one in enumerate(variants):
        os.utime(one.entry / "complete.json", (age, age))
    variants[1].close()  # the younger one of the two that were used before
    with checkout(repository, sha):
        assert [one.entry.exists() for one in variants] == [True, True]
        os.utime(variants[1].entry / "complete.json", (1, 1))
        with checkout(repository, git(repo, "rev-parse", "old")):
            assert [one.entry.exists() for one in variants] == [True, False]
    variants[0].close()


def test_threads_of_one_process_too(repo: Path) -> None:
    repository, sha = open_repository(repo), git(repo, "rev-parse", "HEAD")
    found: list[Checkout] = []
    threads = [threading.Thread(target=lambda: found.append(checkout(repository, sha))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.made for one in found) == [False, False, False, True]
    for one in found:
        one.close()


def test_atom_clean_says_what_it_sweeps(repo: Path) -> None:
    repository, sha = open_repository(repo), git(repo, "rev-parse", "HEAD")
    with pytest.raises(RunError):
        checkout(repository, sha, prepare=command("raise SystemExit(1)"), variant="v")
    checkout(repository, sha).close()

    def clean(*flags: str) -> list[str]:
        code = "import sys; from atom.cli.clean import app; app(sys.argv[1:])"
        words = [sys.executable, "-c", code, "--dry-run", "--json", "-", *flags]
        env = {**os.environ, "PYTHONPATH": str(import_root())}
        found = json.loads(subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout)
        return [Path(path).name for path in found["checkouts"]]

    plain = f"{repository.key}-{sha[:16]}"
    (half,) = clean()
    assert half.startswith(f"{plain}-")
    assert clean("--cache") == [plain, half]


# ---- what runs in a checkout may change it


def tells_and_writes(_: Path) -> list[tuple[list[str], Mapping[str, str]]]:
    """A build that changes a file of the commit, and makes one of its own."""
    program = "open('b', 'a').write('built'); open('made.py', 'w').write(''); open('log', 'w').write('')"
    return [([sys.executable, "-c", program], os.environ)]


@pytest.mark.parametrize("prepare", [None, tells_and_writes])
@pytest.mark.parametrize(
    ("name", "again"), [("a", True), ("new.py", True), ("log", False), ("__pycache__/a.pyc", False)]
)
def test_a_checkout_that_was_changed_is_made_again(
    repo: Path, name: str, again: bool, prepare: source.Prepare | None
) -> None:
    repository = open_repository(repo)
    sha = repository.resolve("main").sha
    with checkout(repository, sha, prepare=prepare) as made:
        (made.tree / name).parent.mkdir(exist_ok=True)
        (made.tree / name).write_text("changed\n")
    said: list[str] = []
    with checkout(repository, sha, prepare=prepare, note=said.append) as found:
        assert found.made == again
        assert any("it is made again" in line for line in said) == again
        assert (found.tree / "a").read_text() == "two\n"
        assert not (found.tree / "new.py").exists()
    with checkout(repository, sha, prepare=prepare) as found:
        assert not found.made


def test_a_commit_in_a_checkout_is_a_change_too(repo: Path) -> None:
    with checked_out(open_repository(repo), "main") as made:
        commit(made.tree, a="other\n")
    with checked_out(open_repository(repo), "main") as found:
        assert (found.made, (found.tree / "a").read_text()) == (True, "two\n")


def test_what_tests_change_is_put_back(repo: Path) -> None:
    with checked_out(open_repository(repo), "main") as made:
        assert put_back(made.tree) == Changed((), undone=True)
        (made.tree / "a").write_text("changed\n")
        (made.tree / "b").unlink()
        (made.tree / "new.py").write_text("")
        (made.tree / "log").write_text("")
        assert put_back(made.tree) == Changed(["a", "b", "new.py"], undone=True)
        assert sorted(path.name for path in made.tree.iterdir()) == [".git", "a", "b", "log"]
        assert (made.tree / "a").read_text() == "two\n"


def test_what_was_built_cannot_be_put_back(repo: Path) -> None:
    repository = open_repository(repo)
    with checkout(repository, repository.resolve("main").sha, prepare=tells_and_writes) as made:
        assert put_back(made.tree).files == ()
        (made.tree / "b").write_text("changed\n")
        changed = put_back(made.tree)
        assert (list(changed.files), changed.undone) == (["b"], False)


def test_looking_makes_no_lock(repo: Path, cache: Path) -> None:
    checked_out(open_repository(repo), "main").close()
    (cache / "checkouts" / "half-made").mkdir()
    for lock in (cache / "checkouts").glob("*.lock"):
        lock.unlink()
    assert len(stale_checkouts(unused=True)) == 2
    assert not list((cache / "checkouts").glob("*.lock"))
