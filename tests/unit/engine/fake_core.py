"""A stand-in for `atom.engine.core_process` that tests start as a script: it answers each prompt with the prompt, one
token per sequence and step, or misbehaves as its first argument says. No scheduler, no executor, no model.

The prompt's tokens are the output, so a test scripts what comes. Values from 1,000 on are commands:

    DIE        the process kills itself          FAIL   it sends EngineFailed and exits
    GARBAGE    it sends bytes that are no message
    REFUSE     the sequence ends with an error   PAUSE  the sequence gets no further tokens
"""

from __future__ import annotations

import argparse
import os
import signal
import struct
import sys
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from atom.engine.messages import (
    AbortRequests,
    AddRequest,
    CoreInput,
    EngineFailed,
    EngineReady,
    FinishedSequence,
    FirstSchedule,
    SchedulerStats,
    Shutdown,
    StepOutputs,
    TokenLogprobs,
    UtilityCall,
    UtilityResult,
)
from atom.engine.sampling_params import SamplingParams

DIE, FAIL, GARBAGE, REFUSE, PAUSE = range(1_000, 1_005)


@dataclass
class Running:
    params: SamplingParams
    tokens: list[int]
    arrival_ns: int
    sent: int = 0


class FakeCore:
    def __init__(self, args: argparse.Namespace) -> None:
        self.behaviour: str = args.behaviour
        self.index: int = args.index
        self.step_ms: float = args.step_ms
        self.tokens_per_step: int = args.tokens_per_step
        context = zmq.Context()
        self.input = context.socket(zmq.PULL)
        self.input.connect(args.input)
        self.output = context.socket(zmq.PUSH)
        self.output.connect(args.output)
        self.running: dict[int, Running] = {}
        self.most_running = 0
        self.aborted: list[int] = []
        self.stopping = False
        self.step = 0

    def send(self, message: Any) -> None:
        self.output.send(msgspec.msgpack.encode(message))

    def serve(self) -> None:
        decoder = msgspec.msgpack.Decoder(CoreInput)
        parent = os.getppid()
        while os.getppid() == parent and not (self.stopping and not self.running):
            while self.input.poll(0 if self.can_step() else 5):
                self.handle(decoder.decode(self.input.recv()))
            if self.can_step():
                time.sleep(self.step_ms / 1e3)
                self.emit()

    def can_step(self) -> bool:
        return any(run.tokens[run.sent] != PAUSE for run in self.running.values())

    def handle(self, message: CoreInput) -> None:
        match message:
            case AddRequest():
                tokens = list(struct.unpack(f"<{len(message.prompt) // 4}i", message.prompt))
                self.running[message.seq_id] = Running(message.params, tokens, message.arrival_ns)
                self.most_running = max(self.most_running, len(self.running))
            case AbortRequests():
                self.aborted.extend(message.seq_ids)
                for seq_id in message.seq_ids:
                    self.running.pop(seq_id, None)
            case UtilityCall():
                self.answer(message)
            case Shutdown():
                if self.behaviour == "ignores-shutdown":
                    return
                self.stopping = True
                if not message.drain:
                    self.running.clear()

    def answer(self, call: UtilityCall) -> None:
        if call.method == "ping":
            self.send(UtilityResult(call.call_id, {"pid": os.getpid()}))
        elif call.method == "most":
            self.send(UtilityResult(call.call_id, self.most_running))
        elif call.method == "aborted":
            self.send(UtilityResult(call.call_id, self.aborted))
        elif call.method == "running":
            self.send(UtilityResult(call.call_id, sorted(self.running)))
        elif call.method != "silence":
            self.send(UtilityResult(call.call_id, None, f"no operation {call.method!r}"))

    def emit(self) -> None:
        self.step += 1
        columns: dict[str, Any] = {"seq_ids": [], "token_ids": [], "counts": [], "finished": []}
        columns |= {"first_scheduled": [], "logprobs": {}, "prompt_logprobs": {}}
        for seq_id, run in list(self.running.items()):
            command = run.tokens[run.sent]
            if command == PAUSE:
                continue
            if not run.sent:
                first = FirstSchedule(seq_id, run.arrival_ns, time.monotonic_ns(), len(run.tokens) // 2)
                columns["first_scheduled"].append(first)
            if command >= DIE:
                self.obey(seq_id, command, columns)
            else:
                self.emit_tokens(seq_id, run, columns)
        if self.tokens_per_step == 1:
            columns["counts"] = None
        stats = SchedulerStats(num_running=len(self.running), num_steps_total=self.step)
        self.send(StepOutputs(self.index, self.step, time.monotonic_ns(), stats=stats, **columns))

    def emit_tokens(self, seq_id: int, run: Running, columns: dict[str, Any]) -> None:
        limit = min(len(run.tokens), run.params.max_tokens or len(run.tokens))
        tokens: list[int] = []
        reason, stop_token = None, None
        while run.sent < limit and len(tokens) < self.tokens_per_step and run.tokens[run.sent] < DIE:
            tokens.append(run.tokens[run.sent])
            run.sent += 1
            if tokens[-1] in run.params.stop_token_ids:
                reason, stop_token = "stop", tokens[-1]
                break
        if reason is None and run.sent == limit:
            reason = "length"
        if run.params.prompt_logprobs is not None and run.sent == len(tokens):
            columns["prompt_logprobs"][seq_id] = [None, *(logprob(token) for token in run.tokens[1:])]
        if run.params.logprobs is not None:
            columns["logprobs"][seq_id] = [logprob(token) for token in tokens]
        columns["seq_ids"].append(seq_id)
        columns["token_ids"].extend(tokens)
        columns["counts"].append(len(tokens))
        if reason is not None:
            columns["finished"].append(FinishedSequence(seq_id, reason, stop_token))
            del self.running[seq_id]

    def obey(self, seq_id: int, command: int, columns: dict[str, Any]) -> None:
        if command == REFUSE:
            columns["finished"].append(FinishedSequence(seq_id, "error", error="refused by the fake core"))
            del self.running[seq_id]
        elif command == GARBAGE:
            self.output.send(b"\xc1 is no message")
            self.running[seq_id].tokens[self.running[seq_id].sent] = PAUSE
        elif command == FAIL:
            self.send(EngineFailed(self.index, "the fake core gives up"))
            sys.exit(1)
        elif command == DIE:
            os.kill(os.getpid(), signal.SIGKILL)


def logprob(token: int) -> TokenLogprobs:
    return TokenLogprobs([token, token + 1], [-0.5, -1.5], 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviour", nargs="?", default="serves")
    parser.add_argument("--tokens-per-step", type=int, default=1)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--index", type=int)
    for flag in ("--input", "--output"):
        parser.add_argument(flag)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if args.behaviour == "ignores-shutdown":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.behaviour == "exits-early":
        print("cannot find the answer", file=sys.stderr)
        sys.exit(42)
    core = FakeCore(args)
    if args.behaviour == "fails-to-load":
        core.send(EngineFailed(args.index, "config.json: no such model"))
        sys.exit(1)
    if args.behaviour == "never-ready":
        time.sleep(60)
    info = {"max_model_len": 100_000 + args.index, "executor": "fake", "vocab_size": 259}
    core.send(EngineReady(args.index, os.getpid(), info))
    core.serve()


if __name__ == "__main__":
    main()
