"""Source of an arm: a checkout of its own in a cache, which a later comparison finds again.

`$XDG_CACHE_HOME/atom/checkouts/<key>/` holds `tree/` (the checkout), `caches/` (compile caches of arms that run it),
the logs of what prepared it, and last of all `complete.json`: an entry without it was abandoned half-way and is made
again. `<key>.lock` beside it is locked (flock, so that the kernel unlocks for a process that is killed): exclusively
while an entry is made or removed, shared while it is in use. The objects are those of the user's repository
(alternates); nothing is written there. `compare/git.py` asks git.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from atom.bench.regular_file import read_regular
from atom.diag.compare.git import Repository, cache_root, git_words, run_git
from atom.diag.compare.supervised import run_supervised
from atom.recipes.errors import RunError
from atom.recipes.hints import describe_status

__all__ = ["KEPT", "Changed", "Checkout", "StaleCheckout", "checkout", "put_back", "stale_checkouts", "sweep_checkouts"]

KEPT: Final = 8
"""Checkouts that are kept for a later comparison; of more, the least recently used that nobody has go."""
PREPARE_TIMEOUT_S: Final = 4 * 3600.0
_REMOVE_S: Final = 15.0
"""A build whose conductor was killed is ended by its supervisor, which may take a moment."""
_COMPLETE: Final = "complete.json"
_MOST_FACTS: Final = 64 << 20
Prepare = Callable[[Path], Sequence[tuple[Sequence[str], Mapping[str, str]]]]
"""Commands to run in a checkout and their whole environments, given its top directory."""


class Checkout:
    """An entry of the cache, in use until `close` (or the end of this process)."""

    def __init__(self, entry: Path, lock: int, *, made: bool) -> None:
        self.entry = entry
        self.made = made
        """Whether it was made just now, or found."""
        self._lock = lock

    @property
    def tree(self) -> Path:
        return self.entry / "tree"

    def cache(self, key: str) -> Path:
        """A directory for the compile caches of one way to run this checkout."""
        path = self.entry / "caches" / key
        path.mkdir(parents=True, exist_ok=True)
        return path

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def checkout(
    repository: Repository,
    sha: str,
    *,
    prepare: Prepare | None = None,
    variant: str = "",
    note: Callable[[str], None] = lambda _: None,
) -> Checkout:
    """A complete checkout of `sha`, made if there is none. Waits while another process makes the same one.

    `prepare` runs once, when the checkout is made; `variant` says what it depends on: another one is another checkout,
    because builds stay in the tree. RunError if git, or a command of `prepare`, fails: with its last lines.
    """
    root = _root()
    key = f"{repository.key}-{sha[:16]}" + (f"-{hashlib.sha256(variant.encode()).hexdigest()[:8]}" if variant else "")
    entry = root / key
    made = False
    while True:
        lock = _lock(root / f"{key}.lock", fcntl.LOCK_SH, note)
        if _is_as_made(entry):
            os.utime(entry / _COMPLETE)
            break
        os.close(lock)
        lock = _lock(root / f"{key}.lock", fcntl.LOCK_EX, note)
        try:
            if not _is_as_made(entry):
                if _is_complete(entry):
                    note(f"{entry}: somebody changed files in this checkout; it is made again")
                _remove(entry)
                _make(repository, sha, entry, note)
                _prepare(entry, prepare, note)
                facts = {"repository": str(repository.path), "sha": sha, "variant": variant, **_state_of(entry, sha)}
                _write_complete(entry, facts)
                made = True
        except PrepareFailedError:
            raise
        except BaseException:
            # Under the lock: the entry is this process's alone.
            _remove(entry)
            raise
        finally:
            os.close(lock)
    found = Checkout(entry, lock, made=made)
    if made:
        _remove_oldest(root)
    return found


# ---- making one ----------------------------------------------------------------------------------------------------


def _make(repository: Repository, sha: str, entry: Path, note: Callable[[str], None]) -> None:
    """A repository of its own with the user's objects, and the tree of `sha` in it."""
    tree = entry / "tree"
    note(f"checking out {sha[:12]} of {repository.path}")
    tree.mkdir(parents=True)
    _git(tree, "init", "--quiet", "--template=", f"--object-format={repository.object_format}")
    own = tree / ".git"
    objects = [str(one) for one in repository.object_directories]
    (own / "objects" / "info").mkdir(parents=True, exist_ok=True)
    (own / "objects" / "info" / "alternates").write_text(
        "".join(f"{_quoted(one)}\n" for one in objects), encoding="utf-8", errors="surrogateescape"
    )
    if (repository.common / "shallow").exists():
        shutil.copyfile(repository.common / "shallow", own / "shallow")
    _copy_promises(repository, tree)
    # Builds that take their version from tags (setuptools-scm) find them.
    tags = repository.ask("for-each-ref", "--format=create %(refname) %(objectname)", "refs/tags")
    if tags:
        _git(tree, "update-ref", "--stdin", text=f"{tags}\n")
    _git(tree, "checkout", "--quiet", "--detach", sha)
    # Where objects are missing, git 2.39 leaves files out and ends with status 0.
    if missing := _git(tree, "ls-files", "--deleted", "-z").split("\0")[:-1]:
        raise RunError(
            f"the checkout in {tree} lacks {len(missing)} files, such as {missing[0]}: "
            f"{repository.path} has not all objects of {sha[:12]}"
        )


def _copy_promises(repository: Repository, tree: Path) -> None:
    """A partial clone's objects come from its remote when they are needed."""
    wanted = r"^(remote\..*\.(url|promisor|partialclonefilter)|extensions\.partialclone)$"
    if repository.ask("config", "--get-regexp", r"^remote\..*\.promisor$") is None:
        return
    for entry in (repository.ask("config", "--null", "--get-regexp", wanted) or "").split("\0"):
        name, found, value = entry.partition("\n")
        if found:
            _git(tree, "config", "--add", name, value)
    _git(tree, "config", "core.repositoryFormatVersion", "1")


def _git(tree: Path, *arguments: str, text: str | None = None) -> str:
    done = run_git(["-C", str(tree), *arguments], {}, text)
    if done.returncode:
        raise RunError(f"the checkout in {tree} cannot be made: git {arguments[0]}: {git_words(done.stderr)}")
    return done.stdout


def _quoted(path: str) -> str:
    """As a line of `info/alternates`."""
    return json.dumps(path, ensure_ascii=False) if path.startswith(("#", '"')) else path


class PrepareFailedError(RunError):
    """What prepares a checkout failed. What it left stays where its log is, until the next try or `atom clean`."""


def _prepare(entry: Path, prepare: Prepare | None, note: Callable[[str], None]) -> None:
    """Run what prepares the checkout, one log each."""
    for index, (command, env) in enumerate([] if prepare is None else prepare(entry / "tree")):
        shown = " ".join(command)[:200]
        note(f"preparing: {shown}")
        log = entry / f"prepare-{index}.log"
        ended = run_supervised(command, cwd=entry / "tree", env=env, log=log, timeout_s=PREPARE_TIMEOUT_S)
        if ended.problem is not None or ended.status != 0:
            what = ended.problem or describe_status(ended.status or 0)
            lines = "".join(f"\n    {line}" for line in ended.lines[-12:])
            raise PrepareFailedError(f"prepare[{index}] (`{shown}`) failed: {what}; its log is {log}{lines}")


# ---- the cache -----------------------------------------------------------------------------------------------------


def _root() -> Path:
    root = cache_root() / "checkouts"
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    info = root.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise RunError(f"{root}: the cache of checkouts must be a directory of this user")
    return root


def _lock(path: Path, how: int, note: Callable[[str], None] | None) -> int:
    """An open file with the lock; -1 if `note` is None and somebody else has it. Whoever removes an entry also removes
    the lock's file, so it has to be looked at again once it is had."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(fd, how | fcntl.LOCK_NB)
            except BlockingIOError:
                if note is None:
                    os.close(fd)
                    return -1
                note("waiting for another process that makes the same checkout")
                fcntl.flock(fd, how)
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(fd).st_ino == path.stat().st_ino:
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _is_complete(entry: Path) -> bool:
    return (entry / _COMPLETE).is_file() and (entry / "tree").is_dir()


def _is_as_made(entry: Path) -> bool:
    """Complete, and with the files it had then: whatever ran in it may have changed them."""
    if not _is_complete(entry):
        return False
    facts = _facts_of(entry)
    try:
        state = _state_of(entry, str(facts.get("sha")))
    except RunError:
        return False
    return all(facts.get(name) == value for name, value in state.items())


def _facts_of(entry: Path) -> dict[str, Any]:
    try:
        facts = json.loads(read_regular(entry / _COMPLETE, _MOST_FACTS))
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _state_of(entry: Path, sha: str) -> dict[str, Any]:
    """In what the tree differs from its commit, and the Python files that are neither in that nor ignored. What else a
    build or a server leaves there is its own."""
    tree = entry / "tree"
    diff = _git(tree, "diff", "--binary", "--no-ext-diff", "--no-textconv", "--no-renames", sha)
    digest = hashlib.sha256(diff.encode("utf-8", "surrogateescape")).hexdigest()
    others = _git(tree, "ls-files", "--others", "--exclude-standard", "-z").split("\0")
    return {"difference": digest if diff else "", "python_files": sorted(map(ascii, filter(_is_python, others)))}


def _is_python(name: str) -> bool:
    return name.endswith((".py", ".pth"))


@dataclass(frozen=True, slots=True)
class Changed:
    """What was found changed in a checkout."""

    files: Sequence[str]
    undone: bool
    """Whether they are as before again."""


def put_back(tree: Path) -> Changed:
    """Make the files of a checkout what they were when it was complete, as far as they were its commit's. Only for who
    has it in use."""
    entry = tree.parent
    facts, undone = _facts_of(entry), False
    if not facts or _is_as_made(entry):
        return Changed((), undone=True)
    sha = str(facts.get("sha"))
    files = _git(tree, "diff", "--name-only", "--no-renames", "-z", sha).split("\0")[:-1]
    others = [
        one for one in _git(tree, "ls-files", "--others", "--exclude-standard", "-z").split("\0") if _is_python(one)
    ]
    new = [one for one in others if ascii(one) not in facts.get("python_files", [])]
    if facts.get("difference") == "":
        _git(tree, "checkout", "--quiet", "--force", "--detach", sha)
        for name in new:
            (tree / name).unlink(missing_ok=True)
        undone = _is_as_made(entry)
    return Changed([*files, *new] or ["Python files"], undone)


def _write_complete(entry: Path, facts: Mapping[str, Any]) -> None:
    temporary = entry / f"{_COMPLETE}.new"
    temporary.write_text(json.dumps({**facts, "made": time.time()}, default=str), encoding="utf-8")
    temporary.rename(entry / _COMPLETE)


def _remove(entry: Path, patience_s: float = _REMOVE_S) -> None:
    """Take the mark away first: an entry that is half removed must not look complete. RunError if something stays."""
    with contextlib.suppress(OSError):
        (entry / _COMPLETE).unlink()
    deadline = time.monotonic() + patience_s
    while True:
        shutil.rmtree(entry, ignore_errors=True)
        if not entry.exists():
            return
        if time.monotonic() > deadline:
            raise RunError(f"{entry}: cannot be removed; something still writes there, or it is another user's")
        time.sleep(0.1)


def _entries(root: Path) -> Iterator[Path]:
    return (path for path in root.iterdir() if path.suffix != ".lock" and path.is_dir() and not path.is_symlink())


def _last_use(entry: Path) -> float:
    try:
        return (entry / _COMPLETE).stat().st_mtime
    except OSError:
        return 0.0


def _remove_oldest(root: Path) -> None:
    entries = sorted(_entries(root), key=_last_use, reverse=True)
    for entry in entries[KEPT:]:
        _remove_unused(entry)


def _remove_unused(entry: Path) -> bool:
    """Remove an entry and its lock, unless somebody has it."""
    lock_path = entry.with_name(f"{entry.name}.lock")
    lock = _lock(lock_path, fcntl.LOCK_EX, None)
    if lock < 0:
        return False
    try:
        _remove(entry, patience_s=0.0)
        lock_path.unlink(missing_ok=True)
    except RunError:
        return False
    finally:
        os.close(lock)
    return True


# ---- sweeping ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StaleCheckout:
    """Something in the cache that nobody uses."""

    path: Path
    half_made: bool
    """Abandoned while it was made; else a complete one that a later comparison could use."""


def stale_checkouts(*, unused: bool = False) -> list[StaleCheckout]:
    """Checkouts that were abandoned half-way; with `unused` also complete ones that nobody has in use. Looks only."""
    root = cache_root() / "checkouts"
    if not root.is_dir() or root.is_symlink():
        return []
    found = []
    for entry in sorted(_entries(root)):
        half_made = not _is_complete(entry)
        if (half_made or unused) and not _in_use(entry):
            found.append(StaleCheckout(entry, half_made))
    return found


def _in_use(entry: Path) -> bool:
    """Looks only: a lock that nobody has made is not made for it."""
    try:
        fd = os.open(entry.with_name(f"{entry.name}.lock"), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def sweep_checkouts(stale: Sequence[StaleCheckout]) -> list[StaleCheckout]:
    """Remove them, except what has come into use; returns those that were removed. Commits of working trees that no
    checkout needs any more go with them."""
    removed = [one for one in stale if _remove_unused(one.path)]
    if any(not one.half_made for one in removed):
        _remove_unused_snapshots()
    return removed


def _remove_unused_snapshots() -> None:
    root, snapshots = cache_root() / "checkouts", cache_root() / "snapshots"
    if not snapshots.is_dir() or snapshots.is_symlink():
        return
    needed = {entry.name.partition("-")[0] for entry in _entries(root)}
    for path in snapshots.iterdir():
        # One that was just made has no checkout yet.
        old = path.lstat().st_mtime < time.time() - 3600
        if old and path.name not in needed and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
