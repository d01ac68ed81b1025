"""`CoreManager`: the API process's side of the EngineCore processes.

It owns the processes, the sockets and one output thread, and keeps a table of open sequences. The output thread turns
each `StepOutputs` into one callback per sequence and one flush per step; where somebody reads them, it also queues
finished sequences. Text is not made here (`engine/output_processor.py`), nor is anything handed to an event loop
except in asyncio mode (`engine/streaming.py`). What a message means: `engine/messages.py`.

Nothing here grows with the number of requests served: a sequence leaves the table when it finishes or is aborted, and
the number of open and unread sequences is bounded by admission (`max_open_sequences`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

import zmq

from atom.engine.api_sequence import ApiSequence, OutputCallback, pack_token_ids
from atom.engine.config import EngineConfig
from atom.engine.core_channel import CoreChannel
from atom.engine.core_handle import CORE_COMMAND, CoreHandle, wait_all
from atom.engine.core_receiver import receive_until_exit
from atom.engine.errors import EngineDeadError, OutputsNotConsumedError, QueueFullError
from atom.engine.messages import (
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_STOP,
    AbortRequests,
    AddRequest,
    CoreInput,
    CoreOutput,
    EngineFailed,
    EngineReady,
    SchedulerStats,
    Shutdown,
    StepOutputs,
    UtilityCall,
    UtilityResult,
)
from atom.engine.pending_calls import PendingCalls
from atom.engine.sampling_params import SamplingParams

log = logging.getLogger(__name__)

START_TIMEOUT_S: Final = 1800.0
CALL_TIMEOUT_S: Final = 30.0

_SequenceBatch = list[ApiSequence]


class CoreManager:
    """Starts EngineCore processes, sends them requests and dispatches what comes back.

    `add_request`, `abort`, `call` may be used from any thread. Callbacks, `flush`, `on_step` and `on_failure` run on
    the output thread, must not block, and must not call `shutdown`.
    """

    def __init__(
        self, config: EngineConfig, *, asyncio_mode: bool = False, core_command: Sequence[str] = CORE_COMMAND
    ) -> None:
        self._core_command = tuple(core_command)
        self._init_shared_state(config, asyncio_mode=asyncio_mode)

    def _init_shared_state(self, config: EngineConfig, *, asyncio_mode: bool) -> None:
        """Everything that managers of every kind share. The only place where these fields get their first value, and
        the only place that ever writes `asyncio_mode`."""
        self.config = config
        self.asyncio_mode = asyncio_mode
        self.async_output_queue: asyncio.Queue[_SequenceBatch | None] | None = asyncio.Queue() if asyncio_mode else None
        self.consumes_outputs_queue = True
        """Whether somebody reads finished sequences. `deliver_through_callbacks` clears it."""
        self.outputs_queue: queue.SimpleQueue[_SequenceBatch | None] = queue.SimpleQueue()
        self.engines: list[CoreHandle] = []
        self.latest_stats: list[SchedulerStats] = []
        """One per engine, as of its last step that carried any."""
        self.on_step: Callable[[StepOutputs], None] | None = None
        """Sees every step after its tokens were dispatched; for metrics."""
        self.on_failure: Callable[[EngineDeadError], None] | None = None
        """Called once, after every open sequence got its error."""
        self.max_open_sequences = config.scheduler.max_waiting + config.scheduler.max_num_seqs
        self._flush: Callable[[], None] | None = None
        self._sequences: dict[int, ApiSequence] = {}
        self._num_unread = 0
        self._unread_lock = threading.Lock()
        self._seq_ids = itertools.count(1)
        self._calls = PendingCalls()
        self._failure: EngineDeadError | None = None
        self._closing = False
        self._closed = False
        self._shutdown_lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._step_finished: _SequenceBatch = []
        self._step_aborts: list[int] = []
        self._channel: CoreChannel | None = None
        self._output_thread: threading.Thread | None = None

    # ---- life ----------------------------------------------------------------------------------------------------

    def start(self, timeout: float = START_TIMEOUT_S, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Start the cores and wait until they can serve. Blocks for as long as loading a model takes.

        `loop` is where `get_output_async` will run, needed in asyncio mode when the caller is not on it. Raises
        `EngineDeadError` with the reason and the core's last lines; nothing is left running then.
        """
        if self.engines or self._closed:
            raise RuntimeError("a CoreManager starts once")
        if self.asyncio_mode:
            self._loop = loop or asyncio.get_running_loop()
        deadline = time.monotonic() + timeout
        try:
            with self._shutdown_lock:
                self._open_channel_and_processes()
            for engine in self.engines:
                engine.ready.wait(max(0.0, deadline - time.monotonic()))
                self._raise_if_dead()
                if not engine.ready.is_set():
                    raise EngineDeadError(f"EngineCore was not ready within {timeout:.0f} s{engine.log_tail()}")
            # A round trip proves that the input path is connected too; then nothing needs the sockets' names any more.
            self.call("ping", timeout=max(1.0, deadline - time.monotonic()))
        except BaseException:
            self.shutdown(drain=False, timeout=0.0)
            raise
        assert self._channel is not None
        self._channel.unlink()

    def _open_channel_and_processes(self) -> None:
        if self._closing:
            raise EngineDeadError("the engine is shut down")
        config_json = self.config.to_json()
        channel = self._channel = CoreChannel(num_engines=1, send_hwm=2 * self.max_open_sequences + 1024)
        for index, input_address in enumerate(channel.input_addresses):
            addresses = ["--input", input_address, "--output", channel.output_address]
            command = [*self._core_command, *addresses, "--index", str(index)]
            self.engines.append(CoreHandle(command, index, config_json))
            self.latest_stats.append(SchedulerStats())
        self._output_thread = threading.Thread(
            target=self._run_output_thread, args=(channel,), name="EngineCoreOutput", daemon=True
        )
        self._output_thread.start()

    def shutdown(self, drain: bool = False, timeout: float = 10.0) -> None:
        """Stop the cores, finishing what runs when `drain`, and free everything. What is still open after `timeout`
        seconds ends with reason abort. Safe to call twice, also while `start` waits on another thread: that raises
        `EngineDeadError`. Blocks, so not from an event loop."""
        self._closing = True
        for engine in self.engines:
            engine.ready.set()  # whoever waits in `start` looks again, and sees that it is over
        with self._shutdown_lock:
            if not self._closed:
                self._shut_down(drain, timeout)

    def _shut_down(self, drain: bool, timeout: float) -> None:
        if self._failure is None:
            for engine in self.engines:
                with contextlib.suppress(QueueFullError):
                    self._send(engine.index, Shutdown(drain))
        if self._failure is not None or not wait_all(self.engines, timeout):
            for engine in self.engines:
                engine.terminate()
        if self._output_thread is not None:
            self._output_thread.join()
        self._closed = True
        if self._channel is not None:
            self._channel.close()
        for engine in self.engines:
            engine.close()
        self._put(None)

    @property
    def is_alive(self) -> bool:
        """Started, not shut down, and every core process is there."""
        return bool(self.engines) and self._failure is None and not self._closing

    @property
    def failure(self) -> EngineDeadError | None:
        """Why it is dead, once it is."""
        return self._failure

    @property
    def closing(self) -> bool:
        """`shutdown` has begun."""
        return self._closing

    @property
    def info(self) -> dict[str, Any]:
        """What the first core reported when it became ready: max_model_len, num_kv_blocks, executor, dtype, …"""
        return self.engines[0].info if self.engines else {}

    @property
    def num_open_sequences(self) -> int:
        return len(self._sequences)

    def _raise_if_dead(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(str(self._failure))
        if self._closing or not self.engines:
            raise EngineDeadError("the engine is shut down" if self._closing else "the engine was not started")

    # ---- how results leave ---------------------------------------------------------------------------------------

    def set_flush(self, flush: Callable[[], None]) -> None:
        """Have `flush()` called once per step, after the step's callbacks."""
        self._flush = flush

    def deliver_through_callbacks(self, flush: Callable[[], None]) -> None:
        """Wire an entrypoint that takes its results from per-sequence callbacks alone.

        Sets the once-per-step hook and clears `consumes_outputs_queue` together, so that the two cannot drift apart:
        with nobody to read it, a queue of finished sequences would hold every request ever served.
        """
        self.set_flush(flush)
        self.consumes_outputs_queue = False
        with contextlib.suppress(queue.Empty):
            while True:  # what finished before has lost its reader
                self._release_unread(self.outputs_queue.get_nowait())
        self._put(None)

    def get_output(self, timeout: float | None = None) -> _SequenceBatch:
        """Wait for sequences that finished, in the order in which they did; `[]` when `timeout` seconds pass first.

        Raises `OutputsNotConsumedError` when nothing fills the queue, `EngineDeadError` when nothing is left and
        nothing more can come.
        """
        self._raise_if_not_consumed(asyncio_mode=False)
        if self.outputs_queue.empty():
            self._raise_if_dead()
        try:
            batch = self.outputs_queue.get(timeout=timeout)
        except queue.Empty:
            return []
        return self._take(batch)

    async def get_output_async(self) -> _SequenceBatch:
        """`get_output` for asyncio mode; to be used on the loop that `start` was given."""
        self._raise_if_not_consumed(asyncio_mode=True)
        assert self.async_output_queue is not None
        if self.async_output_queue.empty():
            self._raise_if_dead()
        return self._take(await self.async_output_queue.get())

    def _take(self, batch: _SequenceBatch | None) -> _SequenceBatch:
        if batch is None:  # woken because the state changed
            self._raise_if_not_consumed(self.asyncio_mode)
            self._raise_if_dead()
            return []
        self._release_unread(batch)
        return batch

    def _release_unread(self, batch: _SequenceBatch | None) -> None:
        with self._unread_lock:
            self._num_unread -= len(batch or ())

    def _raise_if_not_consumed(self, asyncio_mode: bool) -> None:
        if not self.consumes_outputs_queue:
            raise OutputsNotConsumedError(
                "this engine delivers through callbacks (a server is wired to it), so nothing fills its outputs queue"
            )
        if asyncio_mode != self.asyncio_mode:
            wanted = "get_output_async()" if self.asyncio_mode else "get_output()"
            raise OutputsNotConsumedError(f"this manager's finished sequences are read with {wanted}")

    def _queue_finished(self, batch: _SequenceBatch) -> None:
        if self.consumes_outputs_queue:
            with self._unread_lock:
                self._num_unread += len(batch)
            self._put(batch)

    def _put(self, batch: _SequenceBatch | None) -> None:
        """Queue a batch, or None to make a waiting reader look at what has changed."""
        if self.async_output_queue is None:
            self.outputs_queue.put(batch)
        elif self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: its reader is gone
                self._loop.call_soon_threadsafe(self.async_output_queue.put_nowait, batch)

    # ---- requests ------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        callback: OutputCallback | None = None,
    ) -> int:
        """Send one sequence to a core and return its number. `params.n` must be 1: see `api_sequence.fan_out`.

        Raises `EngineDeadError`, `QueueFullError` when too many sequences are open, `RequestError` for a prompt that
        is no list of token ids.
        """
        return self.add_sequence(request_id, prompt_token_ids, params, callback).seq_id

    def add_sequence(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        callback: OutputCallback | None = None,
        owner: Any = None,
    ) -> ApiSequence:
        """`add_request`, returning the sequence. `owner` stays on it for the caller to find again."""
        assert params.n == 1, "fan out before adding"
        self.check_admission()
        prompt = pack_token_ids(prompt_token_ids)
        seq_id = next(self._seq_ids)
        arrival_ns = time.monotonic_ns()
        seq = ApiSequence(seq_id, request_id, prompt_token_ids, params, arrival_ns, callback, owner)
        self._sequences[seq_id] = seq
        try:
            self._send(seq.engine_index, AddRequest(seq_id, request_id, prompt, params, arrival_ns))
        except BaseException:
            self._sequences.pop(seq_id, None)
            raise
        # The core may have died since the first check; then nobody will ever finish this one.
        if self._failure is not None and self._sequences.pop(seq_id, None) is not None:
            self._raise_if_dead()
        return seq

    def check_admission(self, count: int = 1) -> None:
        """Raise what `add_request` would raise for one of `count` further sequences."""
        self._raise_if_dead()
        if len(self._sequences) + self._num_unread + count > self.max_open_sequences:
            raise QueueFullError(f"the engine takes {self.max_open_sequences} sequences at a time (--max-waiting)")

    def abort(self, seq_ids: Sequence[int], *, discard: bool = False) -> None:
        """Forget these sequences and tell their cores. Unknown and finished ones are ignored.

        No callback follows (the caller knows); where finished sequences are read, they arrive there with reason abort,
        unless `discard`.
        """
        aborted = []
        for seq_id in seq_ids:
            seq = self._sequences.pop(seq_id, None)
            if seq is not None:
                _finish(seq, FINISH_ABORT, time.monotonic_ns())
                seq.callback = None
                aborted.append(seq)
        if aborted:
            for engine in self.engines:
                self._send_aborts(engine.index, [seq.seq_id for seq in aborted if seq.engine_index == engine.index])
            if not discard:
                self._queue_finished(aborted)

    def stop_sequence(self, seq: ApiSequence, stop: str, num_output_tokens: int) -> None:
        """End a sequence whose text matched a stop string in its token number `num_output_tokens` (from 1).

        Only from within its callback; that call is then its last.
        """
        if seq.finish_reason is None:
            self._step_aborts.append(seq.seq_id)
        seq.truncate(num_output_tokens)
        _finish(seq, FINISH_STOP, seq.received_ns)
        seq.stop_reason = stop
        seq.stop_token_id = None
        if self._sequences.pop(seq.seq_id, None) is not None:
            self._step_finished.append(seq)

    def _send(self, engine_index: int, message: CoreInput) -> None:
        assert self._channel is not None
        try:
            self._channel.send(engine_index, message)
        except zmq.Again:
            raise QueueFullError("the engine does not take messages at the moment") from None

    def _send_aborts(self, engine_index: int, seq_ids: list[int]) -> None:
        with contextlib.suppress(EngineDeadError):  # nothing runs there any more
            self._send(engine_index, AbortRequests(seq_ids))

    # ---- utilities -----------------------------------------------------------------------------------------------

    def call(self, method: str, args: dict[str, Any] | None = None, timeout: float = CALL_TIMEOUT_S) -> Any:
        """Run a named operation on the core and return its value. Raises `TimeoutError`, `EngineDeadError`, or
        `AtomEngineError` with the core's message. Blocks: an event loop uses `call_async`."""
        call_id, future = self._begin_call(method, args)
        try:
            return future.result(timeout)
        except TimeoutError:
            raise TimeoutError(f"the engine did not answer {method!r} within {timeout:g} s") from None
        finally:
            self._calls.close(call_id)

    async def call_async(self, method: str, args: dict[str, Any] | None = None, timeout: float = CALL_TIMEOUT_S) -> Any:
        """`call` for an event loop."""
        call_id, future = self._begin_call(method, args)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout)
        except TimeoutError:
            raise TimeoutError(f"the engine did not answer {method!r} within {timeout:g} s") from None
        finally:
            self._calls.close(call_id)

    def _begin_call(self, method: str, args: dict[str, Any] | None) -> tuple[int, Future[Any]]:
        self._raise_if_dead()
        call_id, future = self._calls.open()
        try:
            self._send(0, UtilityCall(call_id, method, args or {}))
            self._raise_if_dead()
        except BaseException:
            self._calls.close(call_id)
            raise
        return call_id, future

    # ---- the output thread ---------------------------------------------------------------------------------------

    def _run_output_thread(self, channel: CoreChannel) -> None:
        error: str | None
        try:
            error = receive_until_exit(channel, self.engines, self._on_message)
        except Exception as exception:
            log.exception("the output thread failed")
            error = f"the engine's output could not be handled: {exception!r}"
        self._finish_all(None if self._closing else error)

    def _on_message(self, message: CoreOutput) -> str | None:
        """Returns the reason to give up when the message is one."""
        match message:
            case StepOutputs():
                self._on_step(message)
            case UtilityResult():
                self._calls.resolve(message)
            case EngineReady():
                engine = self.engines[message.engine_index]
                engine.info = message.info
                engine.ready.set()
            case EngineFailed():
                return f"EngineCore {message.engine_index} failed: {message.error}"
        return None

    def _on_step(self, step: StepOutputs) -> None:
        """One callback per sequence that got tokens or ended, then what is due once per step."""
        now = time.monotonic_ns()
        sequences = self._sequences
        if step.finished or step.first_scheduled or step.logprobs or step.prompt_logprobs:
            self._apply_details(step, now)
        if step.counts is None:
            for seq_id, token in zip(step.seq_ids, step.token_ids, strict=True):
                seq = sequences.get(seq_id)
                if seq is None:
                    continue  # aborted meanwhile
                output = seq.output_token_ids
                if not output:
                    seq.first_token_ns = now
                output.append(token)
                seq.received_ns = now
                callback = seq.callback
                if callback is not None:
                    try:
                        callback(seq, (token,))
                    except Exception as error:
                        self._on_callback_error(seq, error)
        else:
            self._dispatch_counted(step, step.counts, now)
        if step.finished:
            self._close_finished(step)
        if self._step_aborts:
            aborts, self._step_aborts = self._step_aborts, []
            self._send_aborts(step.engine_index, aborts)
        if self._flush is not None:
            self._flush()
        if self._step_finished:
            batch, self._step_finished = self._step_finished, []
            for seq in batch:
                seq.callback = None
            self._queue_finished(batch)
        if step.stats is not None:
            self.latest_stats[step.engine_index] = step.stats
        if self.on_step is not None:
            self.on_step(step)

    def _call_back(self, seq: ApiSequence, token_ids: Sequence[int]) -> None:
        callback = seq.callback
        if callback is None:
            return  # nobody asked, or aborted meanwhile
        try:
            callback(seq, token_ids)
        except Exception as error:
            self._on_callback_error(seq, error)

    def _on_callback_error(self, seq: ApiSequence, error: Exception) -> None:
        """A callback that raises ends its own sequence and no other. It is called once more, to pass the error on."""
        log.error("the output of request %s could not be handled", seq.request_id, exc_info=error)
        if seq.finish_reason is None:
            self._step_aborts.append(seq.seq_id)
        _finish(seq, FINISH_ERROR, time.monotonic_ns())
        seq.error = f"its output could not be handled: {error!r}"
        if seq.callback is not None:
            with contextlib.suppress(Exception):
                seq.callback(seq, ())
        if self._sequences.pop(seq.seq_id, None) is not None:
            self._step_finished.append(seq)

    def _dispatch_counted(self, step: StepOutputs, counts: list[int], now: int) -> None:
        start = 0
        for seq_id, count in zip(step.seq_ids, counts, strict=True):
            token_ids = step.token_ids[start : start + count]
            start += count
            seq = self._sequences.get(seq_id)
            if seq is None:
                continue
            if not seq.output_token_ids and token_ids:
                seq.first_token_ns = now
            seq.output_token_ids.extend(token_ids)
            seq.received_ns = now
            self._call_back(seq, token_ids)

    def _apply_details(self, step: StepOutputs, now: int) -> None:
        """Set what a step says of single sequences before their callbacks run."""
        sequences = self._sequences
        for first in step.first_scheduled:
            if (seq := sequences.get(first.seq_id)) is not None:
                seq.queued_ns = first.queued_ns
                seq.scheduled_ns = first.scheduled_ns
                seq.num_cached_tokens = first.num_cached_tokens
        for seq_id, prompt_logprobs in step.prompt_logprobs.items():
            if (seq := sequences.get(seq_id)) is not None:
                seq.prompt_logprobs = prompt_logprobs
        for seq_id, logprobs in step.logprobs.items():
            if (seq := sequences.get(seq_id)) is not None and seq.logprobs is not None:
                seq.logprobs.extend(logprobs)
        for finished in step.finished:
            if (seq := sequences.get(finished.seq_id)) is not None:
                _finish(seq, finished.reason, now)
                seq.error = finished.error
                seq.stop_token_id = finished.stop_token_id
                if finished.stop_token_id in seq.params.stop_token_ids:
                    seq.stop_reason = finished.stop_token_id

    def _close_finished(self, step: StepOutputs) -> None:
        with_tokens = set(step.seq_ids)
        for finished in step.finished:
            seq = self._sequences.get(finished.seq_id)
            if seq is None:
                continue
            if finished.seq_id not in with_tokens:
                seq.received_ns = seq.finish_ns
                self._call_back(seq, ())
            if self._sequences.pop(finished.seq_id, None) is not None:
                self._step_finished.append(seq)

    def _finish_all(self, error: str | None) -> None:
        """The end: every open sequence and call gets the error, or after a shutdown an abort."""
        if error is not None:
            self._failure = EngineDeadError(error)
        reason = FINISH_ABORT if error is None else FINISH_ERROR
        now = time.monotonic_ns()
        batch = []
        for seq_id in list(self._sequences):
            seq = self._sequences.pop(seq_id, None)
            if seq is None:
                continue
            _finish(seq, reason, now)
            seq.error = error
            seq.received_ns = now
            self._call_back(seq, ())
            seq.callback = None
            batch.append(seq)
        self._step_finished.clear()
        self._step_aborts.clear()
        if self._flush is not None:
            self._flush()
        if batch:
            self._queue_finished(batch)
        self._calls.fail_all(EngineDeadError(error or "the engine is shut down"))
        for engine in self.engines:
            engine.ready.set()  # whoever waits in start() looks at `failure` next
        self._put(None)
        if self._failure is not None and self.on_failure is not None:
            self.on_failure(self._failure)


def _finish(seq: ApiSequence, reason: str, now_ns: int) -> None:
    seq.finish_reason = reason
    seq.finish_ns = now_ns
