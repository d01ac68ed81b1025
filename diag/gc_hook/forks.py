"""The hooks of a process that forks: the child has its own, with a file of its own.

CPython 3.12 warns about a fork in a process that has threads. There the hooks' threads end before a fork and others go
on after it, so that a process of one thread stays one that may fork.

A signal handler may run while the main thread is in here, and raise: the server's shutdown. CPython only prints what
comes out of a function of `os.register_at_fork`. So what runs after the fork in the parent is made of C alone, in which
no handler runs, and an exception that comes up before the fork or in the child is kept and raised again afterwards.
What remains is the microsecond in which such a function begins, as with every Python function registered there.
"""

from __future__ import annotations

import _thread
import operator
import os
import sys
from functools import partial

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any

    from .hook import GcHook

__all__ = ["HOOKS", "watch_forks"]

HOOKS: list[GcHook] = []
"""Those installed in this process: more than one if it is recorded into several directories."""

_resume: list[Callable[[], Any]] = []
_raise_again: list[Callable[[], Any]] = []
_watching = False


def watch_forks() -> None:
    """Once for all hooks, because CPython cannot unregister it."""
    global _watching
    if _watching or not hasattr(os, "register_at_fork"):
        return
    _watching = True
    os.register_at_fork(after_in_child=_in_child)
    # Before any thread is started: one that has not begun yet goes by the same number as the one that started it.
    os.register_at_fork(after_in_child=_caller_of(_raise_again), after_in_parent=_caller_of(_raise_again))
    if sys.version_info >= (3, 12):
        os.register_at_fork(before=_before, after_in_parent=_caller_of(_resume))


def _caller_of(functions: list[Callable[[], Any]]) -> Callable[[], Any]:
    """A function that calls those that are then in the list, with no code in Python; they return numbers."""
    return partial(max, functions, key=operator.methodcaller("__call__"), default=0)


def _before() -> None:
    try:
        _resume.clear()
        _raise_again.clear()
        for hook in list(HOOKS):
            hook.before_fork(_resume)
    except BaseException as error:
        _keep(error)


def _in_child() -> None:
    try:
        _raise_again.clear()  # that was for the parent
        for hook in list(HOOKS):
            hook.after_fork_in_child()
    except BaseException as error:
        _keep(error)


def _keep(error: BaseException) -> None:
    """Have it raised again, the very object, when the fork is over. What is the hook's own fault is only printed."""
    if not _is_of_a_handler(error):
        raise error
    kind = type(error)
    again = type(kind.__name__, (kind,), {"__new__": lambda *_: error, "__module__": kind.__module__})
    try:
        import ctypes

        set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
        me = ctypes.c_ulong(_thread.get_ident())
        _raise_again.append(partial(set_exception, me, ctypes.py_object(again)))
    except (ImportError, AttributeError):  # an interpreter without ctypes
        if not isinstance(error, KeyboardInterrupt):
            raise error from None
        _raise_again.append(_thread.interrupt_main)


def _is_of_a_handler(error: BaseException) -> bool:
    if not isinstance(error, Exception):  # the hook raises neither SystemExit nor KeyboardInterrupt
        return True
    at: TracebackType | None = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is not None and at.tb_frame.f_globals.get("__package__") != __package__
