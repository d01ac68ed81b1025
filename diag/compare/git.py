"""Asking git: one repository, its commits, and its working tree as a commit. Never changes the user's repository: no
index, no branch, no worktree, no object is written there.

What a commit of the working tree needs beyond the repository's own objects is kept in a directory of the cache, so that
every command here sees both. Checkouts are `compare/source.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from atom.recipes.errors import RunError, UsageError

__all__ = ["WORKTREE", "Commit", "Repository", "cache_root", "find_repository", "open_repository"]

WORKTREE: Final = "WORKTREE"
"""The working tree as it is; `.` means the same."""
TIMEOUT_S: Final = 600.0
MAX_UNTRACKED_BYTES: Final = 1 << 30
"""More than this in files that git does not know is taken for an accident."""
_QUIET: Final = ("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "advice.detachedHead=false")
_ALTERNATES: Final = "GIT_ALTERNATE_OBJECT_DIRECTORIES"
_NOBODY: Final = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "atom"), ("EMAIL", "atom@localhost"))
}


def cache_root() -> Path:
    """`$XDG_CACHE_HOME/atom`, or `~/.cache/atom`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "atom"


@dataclass(frozen=True, slots=True)
class Commit:
    """What a spec stands for."""

    sha: str
    ref: str
    """The name it was found under: `main`, `origin/main`, `WORKTREE`."""
    subject: str
    commit_time: int
    """Seconds since 1970."""
    dirty: bool = False
    """It is a commit of a working tree that differs from `head`."""
    head: str | None = None
    """Of a working tree: what is checked out there."""
    note: str | None = None
    """What somebody should know about how it was found."""


@dataclass(frozen=True, slots=True)
class Repository:
    """A git repository on this machine. Made by `open_repository`."""

    path: Path
    """Top directory of the working tree; of a bare repository, the repository."""
    common: Path
    """Where its objects and refs are."""
    bare: bool
    shallow: bool
    object_format: str

    @property
    def key(self) -> str:
        return hashlib.sha256(os.fsencode(self.common)).hexdigest()[:12]

    @property
    def own_objects(self) -> Path:
        """Objects of working trees that were made into commits."""
        return cache_root() / "snapshots" / self.key

    @property
    def object_directories(self) -> list[Path]:
        return [self.common / "objects", *([self.own_objects] if self.own_objects.is_dir() else [])]

    def run(self, *arguments: str, env: Mapping[str, str] | None = None, text: str | None = None) -> str:
        """Standard output of a git command. RunError with git's own words if it fails."""
        done = self._start(arguments, env, text)
        if done.returncode:
            raise RunError(f"{self.path}: git {arguments[0]} failed: {git_words(done.stderr)}")
        return done.stdout

    def ask(self, *arguments: str) -> str | None:
        """The same without its last newline; None if the command fails."""
        done = self._start(arguments, None, None)
        return None if done.returncode else done.stdout.rstrip("\n")

    def _start(
        self, arguments: Sequence[str], env: Mapping[str, str] | None, text: str | None
    ) -> subprocess.CompletedProcess[str]:
        return run_git(["-C", str(self.path), *arguments], {**self.environment(), **(env or {})}, text)

    def environment(self) -> dict[str, str]:
        """For a git command that is to see the objects of working trees too."""
        return {_ALTERNATES: _quoted(self.own_objects)} if self.own_objects.is_dir() else {}

    @contextmanager
    def stream(self, *arguments: str) -> Iterator[IO[bytes]]:
        """Output of a git command that may be large."""
        command = ["git", *_QUIET, "-C", str(self.path), *arguments]
        env = {**_clean_environment(), **self.environment()}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, env=env
        ) as process:
            assert process.stdout is not None
            yield process.stdout

    # ---- commits -------------------------------------------------------------------------------------------------

    def resolve(self, ref: str) -> Commit:
        """The commit that `ref` names; `WORKTREE` and `.` are the working tree as it is. UsageError says why not."""
        if ref in (WORKTREE, "."):
            return self.working_tree()
        found, note = self.try_resolve(ref), None
        if found is None and (remote := self._only_remote(ref)) is not None:
            found, note = self.try_resolve(remote), f"{ref} is no branch here; {remote} is taken"
            ref = remote
        if found is None:
            raise UsageError(f"{ref!r} is no ref of {self.path}{self._why_not(ref)}")
        return self.describe(found, ref, note=note)

    def try_resolve(self, ref: str) -> str | None:
        """The sha of a ref; None if there is none. UsageError if it names a branch and a tag that differ."""
        if not ref or ref.startswith("-") or "\0" in ref or "\n" in ref:
            return None
        sha = self.ask("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
        if sha is not None:
            self._refuse_two_meanings(ref)
        return sha

    def _refuse_two_meanings(self, ref: str) -> None:
        names = {}
        for name in (f"heads/{ref}", f"tags/{ref}"):
            sha = self.ask("rev-parse", "--verify", "--quiet", f"refs/{name}^{{commit}}")
            if sha is not None:
                names[name] = sha
        if len(set(names.values())) > 1:
            raise UsageError(f"{ref!r} is a branch and a tag of {self.path}: write {' or '.join(names)}")

    def _only_remote(self, ref: str) -> str | None:
        if not ref or ref.startswith(("-", "/")):
            return None
        remotes = (self.ask("remote") or "").splitlines()
        names = [f"{one}/{ref}" for one in remotes]
        found = [
            name for name in names if self.ask("show-ref", "--verify", "--quiet", f"refs/remotes/{name}") is not None
        ]
        return found[0] if len(found) == 1 else None

    def _why_not(self, ref: str) -> str:
        if self.ask("rev-parse", "--verify", "--quiet", "HEAD^{commit}") is None and not self.ask("for-each-ref"):
            return ", which has no commits yet: commit something, or give `.` for the working tree as it is"
        if self.shallow:
            return f", which is a shallow clone: `git fetch origin {ref}` (or --unshallow) may bring it"
        branches = self.ask("for-each-ref", "--count=8", "--sort=-committerdate", "--format=%(refname:short)") or ""
        return f"; it has {', '.join(branches.split())}" if branches else ""

    def describe(self, sha: str, ref: str, *, note: str | None = None) -> Commit:
        time, _, subject = self.run("show", "-s", "--no-show-signature", "--format=%ct %s", sha).strip().partition(" ")
        return Commit(sha=sha, ref=ref, subject=subject[:200], commit_time=int(time), note=note)

    # ---- the working tree ----------------------------------------------------------------------------------------

    def working_tree(self) -> Commit:
        """The working tree as a commit: what is checked out if nothing differs, else one on top of it with every change
        and every file that is not ignored. The same content makes the same commit."""
        if self.bare:
            raise UsageError(f"{self.path} is a bare repository: it has no working tree; give a branch or a commit")
        self._refuse_much_untracked()
        head = self.ask("rev-parse", "--verify", "--quiet", "HEAD^{commit}")
        objects = self.own_objects
        objects.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.utime(objects)  # in use now
        with tempfile.TemporaryDirectory(prefix="atom-index-") as scratch:
            index = Path(scratch) / "index"
            mine = Path(self.run("rev-parse", "--path-format=absolute", "--git-path", "index").rstrip("\n"))
            if mine.exists():
                shutil.copy2(mine, index)  # with its times: unchanged files are then not read again
            env = {
                "GIT_INDEX_FILE": str(index),
                "GIT_OBJECT_DIRECTORY": str(objects),
                _ALTERNATES: _quoted(self.common / "objects"),
            }
            whole = (
                "-c",
                "core.splitIndex=false",
                "-c",
                "core.untrackedCache=false",
                "-c",
                "advice.addEmbeddedRepo=false",
            )
            self.run(*whole, "add", "--all", env=env)
            tree = self.run(*whole, "write-tree", env=env).strip()
            if head is not None and self.run("rev-parse", f"{head}^{{tree}}").strip() == tree:
                commit = self.describe(head, WORKTREE)
                return Commit(sha=head, ref=WORKTREE, subject=commit.subject, commit_time=commit.commit_time, head=head)
            time = 0 if head is None else self.describe(head, "HEAD").commit_time
            stamp = dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), f"@{time} +0000")
            parent = () if head is None else ("-p", head)
            subject = "the working tree" if head is None else f"the working tree on top of {head[:12]}"
            arguments = ("-c", "commit.gpgSign=false", "commit-tree", tree, *parent, "-m", subject)
            sha = self.run(*arguments, env={**env, **_NOBODY, **stamp}).strip()
        return Commit(sha=sha, ref=WORKTREE, subject=subject, commit_time=time, dirty=True, head=head)

    def _refuse_much_untracked(self) -> None:
        total, largest, size = 0, "", -1
        for name in self.run("ls-files", "--others", "--exclude-standard", "-z").split("\0"):
            try:
                bytes_ = (self.path / name).lstat().st_size if name else 0
            except OSError:
                continue
            total += bytes_
            if bytes_ > size:
                largest, size = name, bytes_
        if total > MAX_UNTRACKED_BYTES:
            raise UsageError(
                f"{self.path}: files that are neither committed nor ignored have {total >> 20} MiB, the largest "
                f"{largest} ({size >> 20} MiB); put them into .gitignore, or compare a commit instead of `.`"
            )

    def submodules(self, sha: str) -> list[str]:
        """Paths of the submodules of a commit."""
        entries = self.run("ls-tree", "-r", "-z", "--full-tree", sha).split("\0")
        return [entry.partition("\t")[2] for entry in entries if entry.startswith("160000 ")]


def open_repository(path: Path) -> Repository:
    """The repository that `path` is in. UsageError if there is none, or git will not have it."""
    if shutil.which("git") is None:
        raise UsageError("comparing git refs needs the program git, which is not installed")
    if not path.is_dir():
        raise UsageError(f"{path}: no such directory; --repo takes the directory of a git repository")
    questions = ("--is-bare-repository", "--is-shallow-repository", "--show-object-format", "--git-common-dir")
    done = run_git(["-C", str(path), "rev-parse", "--path-format=absolute", *questions], {}, None)
    if done.returncode:
        raise UsageError(f"{path}: {git_words(done.stderr)}")
    bare, shallow, object_format, common = done.stdout.rstrip("\n").split("\n", 3)
    top = run_git(["-C", str(path), "rev-parse", "--show-toplevel"], {}, None)
    return Repository(
        path=Path(top.stdout.rstrip("\n")) if top.returncode == 0 else Path(common),
        common=Path(common).resolve(),
        bare=bare == "true" or top.returncode != 0,
        shallow=shallow == "true",
        object_format=object_format,
    )


def find_repository(given: Path | None = None) -> Repository | None:
    """`--repo`; without one (or `.`) the repository of the current directory, else the checkout this tool runs from."""
    if given not in (None, Path()):
        assert given is not None
        return open_repository(given)
    for path in (Path.cwd(), Path(__file__).resolve().parent):
        try:
            return open_repository(path)
        except UsageError:
            continue
    return None


def run_git(arguments: Sequence[str], env: Mapping[str, str], text: str | None) -> subprocess.CompletedProcess[str]:
    """Run git without hooks, questions or the caller's GIT_* variables."""
    try:
        return subprocess.run(
            ["git", *_QUIET, *arguments],
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=TIMEOUT_S,
            env={**_clean_environment(), **env},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RunError(
            f"git {arguments[2] if arguments[0] == '-C' else arguments[0]} took longer than 10 min"
        ) from None


def _quoted(path: Path) -> str:
    """For a list that is separated by colons."""
    text = str(path)
    return text if ":" not in text and not text.startswith('"') else json.dumps(text, ensure_ascii=False)


def git_words(stderr: str) -> str:
    """What git said, in one line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip() and not line.startswith("hint:")]
    text = "; ".join(line.removeprefix("fatal: ").removeprefix("error: ") for line in lines)
    return text.encode("utf-8", "replace").decode("utf-8")[:400] or "it says nothing"


def _clean_environment() -> dict[str, str]:
    """Variables that a hook or `git rebase --exec` sets would point every command here at another repository."""
    kept = {name: value for name, value in os.environ.items() if name not in _OF_A_REPOSITORY}
    return {**kept, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0"}


_OF_A_REPOSITORY: Final = frozenset(
    (
        *("GIT_DIR", "GIT_WORK_TREE", "GIT_IMPLICIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_INDEX_FILE", "GIT_PREFIX"),
        *("GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_SHALLOW_FILE", "GIT_GRAFT_FILE"),
        *("GIT_NAMESPACE", "GIT_CONFIG", "GIT_CONFIG_PARAMETERS", "GIT_EXTERNAL_DIFF", "GIT_DIFF_OPTS"),
        *("GIT_REPLACE_REF_BASE", "GIT_NO_REPLACE_OBJECTS", "GIT_LITERAL_PATHSPECS", "GIT_GLOB_PATHSPECS"),
    )
)
