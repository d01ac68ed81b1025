"""`CoreManager`: the API process's side of the EngineCore processes.

It owns the processes, the sockets and one output thread. The output thread turns each `StepOutputs` into one callback
per sequence (`engine/delivery.py`) and one flush per step; where somebody reads them, it also queues finished
sequences. Which core gets a request, and when: `engine/dispatch.py`. Text is not made here
(`engine/output_processor.py`), nor is anything handed to an event loop except in asyncio mode (`engine/streaming.py`).
What a message means: `engine/messages.py`.

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
from typing import Any, Final

import zmq

from atom.engine import envs
from atom.engine.api_sequence import ApiSequence, OutputCallback, pack_token_ids
from atom.engine.config import EngineConfig
from atom.engine.core_channel import CoreChannel
from atom.engine.core_handle import CORE_COMMAND, CoreHandle, terminate_all
from atom.engine.core_receiver import receive_until_exit
from atom.engine.core_silence import CoreSilence
from atom.engine.delivery import Delivery, finish
from atom.engine.dispatch import Dispatcher
from atom.engine.errors import EngineDeadError, OutputsNotConsumedError, QueueFullError
from atom.engine.messages import (
    FINISH_ABORT,
    FINISH_ERROR,
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
CONNECT_POLL_S: Final = 0.01

_SequenceBatch = list[ApiSequence]


class CoreManager:
    """Starts EngineCore processes, sends them requests and dispatches what comes back.

    `add_request`, `abort`, `call` may be used from any thread. Callbacks, `flush`, `on_step` and `on_failure` run on
    the output thread, must not block, and cannot call `shutdown` or wait for a `call`.
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
        self.max_open_sequences = config.max_open_sequences
        parallel = config.parallel
        self._dispatcher: Dispatcher[AddRequest] = Dispatcher(
            parallel.data_parallel_size, parallel.load_balance, config.dispatch_limit
        )
        self._dispatch = threading.Condition(threading.Lock())
        """Guards `_dispatcher`, the admission of sequences and the order of what is sent to the cores: a core must get
        a request before the abort of it. Notified when nothing is held back."""
        self._silence = CoreSilence(parallel.data_parallel_size)
        self._delivery = Delivery()
        self._flush: Callable[[], None] | None = None
        self._info: dict[str, Any] = {}
        self._faults = envs.FAULTS.read()
        self._num_unread = 0
        self._unread_lock = threading.Lock()
        self._seq_ids = itertools.count(1)
        self._calls = PendingCalls(self._send_call)
        self._failure: EngineDeadError | None = None
        self._outputs_complete = False
        """Whether every sequence that was ever admitted has ended, and nothing more is admitted."""
        self._closing = False
        self._closed = False
        self._shutdown_lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
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
                    waited = f"was not ready within {timeout:.0f} s"
                    raise EngineDeadError(f"EngineCore {engine.index} {waited}{engine.log_tail()}")
            self._prove_inputs(deadline)
            self._info = _common_info([engine.info for engine in self.engines])
        except BaseException:
            self.shutdown(drain=False, timeout=0.0)
            raise
        assert self._channel is not None
        self._channel.unlink()

    def _prove_inputs(self, deadline: float) -> None:
        """A round trip to each core proves that the inputs are connected too; then nothing needs the sockets' names any
        more. A core that says it is ready may be ahead of our end of its input."""
        while True:
            try:
                self.call_all("ping", timeout=max(1.0, deadline - time.monotonic()))
                return
            except TimeoutError as error:
                raise EngineDeadError(f"an EngineCore is ready, but {error}") from None
            except QueueFullError:
                if time.monotonic() > deadline:
                    raise EngineDeadError("an EngineCore is ready, but its input is not connected") from None
                time.sleep(CONNECT_POLL_S)

    def _open_channel_and_processes(self) -> None:
        if self._closing:
            raise EngineDeadError("the engine is shut down")
        config_json = self.config.to_json()
        num_engines = self.config.parallel.data_parallel_size
        channel = self._channel = CoreChannel(num_engines, send_hwm=2 * self.max_open_sequences + 1024)
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
        """Stop the cores, finishing what was admitted when `drain`, and free everything. What is still open after
        `timeout` seconds ends with reason abort. Safe to call twice, also while `start` waits on another thread: that
        raises `EngineDeadError`. Blocks, so not from an event loop."""
        if self.on_output_thread:
            raise RuntimeError("a callback cannot shut its engine down: it runs on the thread that would be waited for")
        self._closing = True
        for engine in self.engines:
            engine.ready.set()  # whoever waits in `start` looks again, and sees that it is over
        with self._shutdown_lock:
            if not self._closed:
                self._shut_down(drain, timeout)

    def _shut_down(self, drain: bool, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with self._dispatch:
            if drain:  # a core that was told to stop takes nothing more
                self._dispatch.wait_for(lambda: not self._dispatcher.num_held_back, timeout)
            self._dispatcher.stop()
        for engine in self.engines:
            with contextlib.suppress(QueueFullError):  # also when it is the one that died
                self._send(engine.index, Shutdown(drain and self._failure is None))
        if self._output_thread is not None:  # it ends with the last core, or with the first that fails
            self._output_thread.join(deadline - time.monotonic())
        terminate_all(self.engines)
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
    def on_output_thread(self) -> bool:
        """Whether the caller runs in a callback, which must not wait for anything that the engine has to do."""
        return threading.current_thread() is self._output_thread

    @property
    def closing(self) -> bool:
        """`shutdown` has begun."""
        return self._closing

    @property
    def info(self) -> dict[str, Any]:
        """What the cores reported when they became ready: max_model_len, num_kv_blocks (of one), executor, dtype, …"""
        return self._info

    @property
    def num_open_sequences(self) -> int:
        """Admitted and not ended."""
        return len(self._delivery.sequences)

    @property
    def num_held_back(self) -> int:
        """Of those, how many no core has yet."""
        return self._dispatcher.num_held_back

    @property
    def num_waiting(self) -> int:
        """Of those, how many wait: for a core, or in one as of its last step."""
        return self.num_held_back + sum(stats.num_waiting for stats in self.latest_stats)

    @property
    def silence(self) -> list[float]:
        """By core, the seconds for which it has said nothing although it has requests in hand; 0 without any."""
        loads = self._dispatcher.loads
        return [self._silence.seconds(index) if load.requests else 0.0 for index, load in enumerate(loads)]

    def _raise_if_dead(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(str(self._failure))
        if self._closing or not self.engines:
            raise EngineDeadError("the engine is shut down" if self._closing else "the engine was not started")

    # ---- how results leave ---------------------------------------------------------------------------------------

    def set_flush(self, flush: Callable[[], None]) -> None:
        """Have `flush()` called once per step, after the step's callbacks."""
        self._flush = flush

    def deliver_through_callbacks(self, flush: Callable[[], None] | None = None) -> None:
        """Wire an entrypoint that takes its results from per-sequence callbacks alone.

        Sets the once-per-step hook, if it has one, and clears `consumes_outputs_queue` together, so that the two
        cannot drift apart: with nobody to read it, a queue of finished sequences would hold every request ever served.
        """
        if flush is not None:
            self.set_flush(flush)
        if "retain-finished" in self._faults:
            log.warning(
                "%s=retain-finished: up to %d finished sequences are kept although nobody reads them, on purpose",
                envs.FAULTS.name,
                self.max_open_sequences,
            )
            return
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
        if self._nothing_can_come and self.outputs_queue.empty():
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
        if self._nothing_can_come and self.async_output_queue.empty():
            self._raise_if_dead()
        return self._take(await self.async_output_queue.get())

    @property
    def _nothing_can_come(self) -> bool:
        """An engine that has just died still has its open sequences to hand over, each with the error."""
        return self._outputs_complete or self._output_thread is None

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

    def _complete_outputs(self) -> None:
        """Nothing will be queued any more; in asyncio mode, once the loop has queued what came before."""
        if self._loop is None:
            self._outputs_complete = True
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(setattr, self, "_outputs_complete", True)

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
        self._raise_if_dead()
        prompt = pack_token_ids(prompt_token_ids)
        seq_id = next(self._seq_ids)
        arrival_ns = time.monotonic_ns()
        seq = ApiSequence(seq_id, request_id, prompt_token_ids, params, arrival_ns, callback, owner)
        request = AddRequest(seq_id, request_id, prompt, params, arrival_ns)
        with self._dispatch:
            self.check_admission()
            self._delivery.sequences[seq_id] = seq
            self._dispatcher.add(seq_id, request, len(prompt_token_ids) + (params.max_tokens or 0))
            try:
                self._refill()
            except BaseException:
                self._delivery.sequences.pop(seq_id, None)
                self._dispatcher.release(seq_id)
                raise
        return seq

    def check_admission(self, count: int = 1) -> None:
        """Raise what `add_request` would raise for one of `count` further sequences."""
        self._raise_if_dead()
        if self.num_open_sequences + self._num_unread + count > self.max_open_sequences:
            raise QueueFullError(f"the engine takes {self.max_open_sequences} sequences at a time (--max-waiting)")

    def abort(self, seq_ids: Sequence[int], *, discard: bool = False) -> None:
        """Forget these sequences and tell their cores. Unknown and finished ones are ignored.

        No callback follows (the caller knows); where finished sequences are read, they arrive there with reason abort,
        unless `discard`.
        """
        aborted = []
        for seq_id in seq_ids:
            seq = self._delivery.sequences.pop(seq_id, None)
            if seq is not None:
                finish(seq, FINISH_ABORT, time.monotonic_ns())
                seq.callback = None
                aborted.append(seq)
        if aborted:
            self._withdraw(aborted)
            if not discard:
                self._queue_finished(aborted)

    def _withdraw(self, aborted: _SequenceBatch) -> None:
        by_engine: dict[int, list[int]] = {}
        with self._dispatch:
            for seq in aborted:
                engine_index = self._dispatcher.release(seq.seq_id)
                if engine_index is not None:  # else no core has heard of it
                    by_engine.setdefault(engine_index, []).append(seq.seq_id)
            for engine_index, seq_ids in by_engine.items():
                self._send_aborts(engine_index, seq_ids)
            self._refill()

    def _settle(self, ended: _SequenceBatch, engine_index: int, aborts: list[int]) -> None:
        """Sequences have ended, read by somebody or not: others may take their places."""
        with self._dispatch:
            for seq in ended:
                self._dispatcher.release(seq.seq_id)
            if aborts:
                self._send_aborts(engine_index, aborts)
            self._refill()

    def _refill(self) -> None:
        """Send what is held back to cores that have room. With `_dispatch` held."""
        while (taken := self._dispatcher.take()) is not None:
            seq_id, engine_index, request = taken
            if (seq := self._delivery.sequences.get(seq_id)) is not None:
                seq.engine_index = engine_index  # before its first token can come
            if self._dispatcher.loads[engine_index].requests == 1:
                self._silence.sent(engine_index)
            try:
                self._send(engine_index, request)
            except QueueFullError:
                self._dispatcher.put_back(seq_id, request)  # a later step tries again
                return
        if not self._dispatcher.num_held_back:
            self._dispatch.notify_all()

    def stop_sequence(self, seq: ApiSequence, stop: str, num_output_tokens: int) -> None:
        """End a sequence whose text matched a stop string in its token number `num_output_tokens` (from 1).

        Only from within its callback; that call is then its last.
        """
        self._delivery.stop(seq, stop, num_output_tokens)

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

    def call(
        self, method: str, args: dict[str, Any] | None = None, timeout: float = CALL_TIMEOUT_S, *, engine_index: int = 0
    ) -> Any:
        """Run a named operation on one core and return its value. Raises `TimeoutError`, `EngineDeadError`, or
        `AtomEngineError` with the core's message. Blocks: an event loop uses `call_async`."""
        return self._calls.wait(method, args or {}, timeout, [engine_index])[0]

    def call_all(self, method: str, args: dict[str, Any] | None = None, timeout: float = CALL_TIMEOUT_S) -> list[Any]:
        """`call` on every core, at the same time; their values by index. `timeout` is for all together."""
        return self._calls.wait(method, args or {}, timeout, range(self.config.parallel.data_parallel_size))

    async def call_async(
        self, method: str, args: dict[str, Any] | None = None, timeout: float = CALL_TIMEOUT_S, *, engine_index: int = 0
    ) -> Any:
        """`call` for an event loop."""
        return (await self._calls.wait_async(method, args or {}, timeout, [engine_index]))[0]

    async def call_all_async(
        self, method: str, args: dict[str, Any] | None = None, timeout: float = CALL_TIMEOUT_S
    ) -> list[Any]:
        """`call_all` for an event loop."""
        return await self._calls.wait_async(method, args or {}, timeout, range(self.config.parallel.data_parallel_size))

    def _send_call(self, engine_index: int, call: UtilityCall) -> None:
        self._raise_if_dead()
        self._send(engine_index, call)
        # The core may have died since the first check; then nobody will ever answer this one.
        self._raise_if_dead()

    # ---- the output thread ---------------------------------------------------------------------------------------

    def _run_output_thread(self, channel: CoreChannel) -> None:
        error: str | None
        try:
            error = receive_until_exit(channel, self.engines, self._on_message, lambda: self._closing)
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
        self._silence.heard(step.engine_index)
        ended, aborts = self._delivery.deliver(step)
        if ended or aborts or self._dispatcher.num_held_back:
            # Before anything that may wait for a reader: the core has room now.
            self._settle(ended, step.engine_index, aborts)
        if self._flush is not None:
            self._flush()
        if ended:
            for seq in ended:
                seq.callback = None
            self._queue_finished(ended)
        if step.stats is not None:
            self.latest_stats[step.engine_index] = step.stats
        if self.on_step is not None:
            self.on_step(step)

    def _finish_all(self, error: str | None) -> None:
        """The end: every open sequence and call gets the error, or after a shutdown an abort."""
        with self._dispatch:
            # From here on nothing is admitted, so what is open now is all there is.
            if error is not None:
                self._failure = EngineDeadError(error)
            self._dispatcher.stop()
        batch = self._delivery.end_all(FINISH_ABORT if error is None else FINISH_ERROR, error)
        with self._dispatch:
            for seq in batch:
                self._dispatcher.release(seq.seq_id)
                seq.callback = None
            self._dispatch.notify_all()
        if self._flush is not None:
            self._flush()
        if batch:
            self._queue_finished(batch)
        self._complete_outputs()
        self._calls.fail_all(EngineDeadError(error or "the engine is shut down"))
        for engine in self.engines:
            engine.ready.set()  # whoever waits in start() looks at `failure` next
        self._put(None)
        if self._failure is not None and self.on_failure is not None:
            self.on_failure(self._failure)


def _common_info(infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first core's, with the context length that every core can serve: each found out by itself what fits."""
    return {**infos[0], "max_model_len": min(info["max_model_len"] for info in infos)}
