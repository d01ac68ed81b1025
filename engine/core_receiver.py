"""The waiting of the output thread: messages from the cores, and their exits, whichever comes first."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import zmq

from atom.engine.core_channel import CoreChannel
from atom.engine.core_handle import CoreHandle
from atom.engine.messages import CoreOutput, UtilityResult

MESSAGES_PER_POLL: Final = 8
EXIT_POLL_MS: Final = 100
"""How often exits are looked for where the kernel has no pidfd."""
LAST_WORDS_MS: Final = 50
"""How long to wait for messages still on their way from a core that has exited."""

Handler = Callable[[CoreOutput], str | None]
"""Takes a message; returns the reason to give up, or None to go on."""


def receive_until_exit(
    channel: CoreChannel, engines: Sequence[CoreHandle], handle: Handler, closing: Callable[[], bool]
) -> str:
    """Pass every message to `handle` until one of the cores has exited or `handle` gives up. Returns the reason.

    While `closing()`, cores have been told to exit: then all of them have to, each in its own time, and only one that
    fails ends it for all.
    """
    running = list(engines)
    poller = zmq.Poller()
    poller.register(channel.output, zmq.POLLIN)
    exit_fds = [engine.exit_fd for engine in engines if engine.exit_fd is not None]
    for fd in exit_fds:
        poller.register(fd, zmq.POLLIN)
    timeout = None if len(exit_fds) == len(engines) else EXIT_POLL_MS
    while True:
        ready = poller.poll(timeout)
        for _ in range(MESSAGES_PER_POLL):
            try:
                message = channel.receive()
            except msgspec.MsgspecError as error:
                return f"EngineCore sent bytes that are no message: {error}"
            if message is None:
                break
            reason = handle(message)
            if reason is not None:
                return reason
        channel.retry_aborts()
        only_output = len(ready) == 1 and ready[0][0] is channel.output
        exited = None if only_output else next((engine for engine in running if engine.returncode is not None), None)
        if exited is not None:
            reason = _last_words(channel, handle, exited.index)
            running.remove(exited)
            if reason is not None or exited.returncode != 0 or not running or not closing():
                return reason or exited.describe_exit()
            if exited.exit_fd is not None:
                poller.unregister(exited.exit_fd)


def _last_words(channel: CoreChannel, handle: Handler, engine_index: int) -> str | None:
    """Handle what a core that has exited sent before. Others may be sending all the time, and prolong nothing."""
    deadline = time.monotonic() + LAST_WORDS_MS / 1e3
    try:
        while (left := deadline - time.monotonic()) > 0 and channel.output.poll(math.ceil(left * 1e3)):
            message = channel.receive()
            if message is not None and (reason := handle(message)) is not None:
                return reason
            if isinstance(message, UtilityResult) or (message is not None and message.engine_index == engine_index):
                deadline = time.monotonic() + LAST_WORDS_MS / 1e3
    except msgspec.MsgspecError:
        pass  # cut short by its death, which says more
    return None
