"""A server for tests that does what it is told: dies, hangs, leaves grandchildren, answers garbage.

Standard library only. Run by path, never imported: `stand_in_server.py --port 0 --port-file F --behaviour NAME…`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BEHAVIOURS = (
    "die-at-start",
    "die-after-ready",
    "never-healthy",
    "hang-on-stop",
    "grandchild",
    "close-port",
    "chatty",
    "metrics-404",
    "metrics-garbage",
    "metrics-hang",
    "metrics-endless",
    "collect",
)

METRICS = """\
# HELP vllm:num_requests_running Running
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0"} 7.0
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:kv_cache_usage_perc{engine="1"} 0.7
vllm:num_preemptions_total{engine="0"} 4.0
vllm:prompt_tokens_total{engine="0"} 1000.0
vllm:generation_tokens_total{engine="0"} 2000.0
process_open_fds NaN
"""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    behaviours: frozenset[str] = frozenset()

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(503 if "never-healthy" in self.behaviours else 200, b"")
        elif self.path == "/v1/models":
            self.answer(200, json.dumps({"object": "list", "data": [{"id": "stand-in"}]}).encode())
        elif self.path == "/die":
            print("stand-in: about to die", flush=True)
            os._exit(9)
        elif self.path == "/metrics":
            self.metrics()
        else:
            self.answer(404, b"{}")

    def metrics(self) -> None:
        if "metrics-404" in self.behaviours:
            self.answer(404, b"no")
        elif "metrics-garbage" in self.behaviours:
            self.answer(200, bytes(range(256)) * 64, "text/plain")
        elif "metrics-hang" in self.behaviours:
            time.sleep(60)
        elif "metrics-endless" in self.behaviours:
            self.send_response(200)
            self.end_headers()
            while True:
                self.wfile.write(b"a_series 1\n" * 1000)
        else:
            self.answer(200, METRICS.encode(), "text/plain; version=0.0.4")


def collect_for_ever() -> None:
    while True:
        gc.collect(0)
        gc.collect()
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--port-file", type=Path)
    parser.add_argument("--behaviour", action="append", default=[], choices=BEHAVIOURS)
    parser.add_argument("--note", type=Path, help="file that gets the pid of a grandchild")
    options = parser.parse_args()
    behaviours = frozenset(options.behaviour)
    Handler.behaviours = behaviours
    print("stand-in: starting", flush=True)
    if "die-at-start" in behaviours:
        print("ModuleNotFoundError: No module named 'warp_drive'", file=sys.stderr, flush=True)
        sys.exit(3)
    if "grandchild" in behaviours:
        # In a session of its own, its parent gone at once: no process group and no child relation leads to it.
        sleeper = "import os,sys,time\nopen(sys.argv[1],'w').write(str(os.getpid()))\ntime.sleep(600)"
        start = f"subprocess.Popen([sys.executable,'-c',{sleeper!r},sys.argv[1]],start_new_session=True)"
        code = f"import subprocess,sys; {start}"
        subprocess.run([sys.executable, "-c", code, str(options.note)], check=True)
    server = ThreadingHTTPServer((options.host, options.port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    if options.port_file:
        temporary = options.port_file.with_suffix(".tmp")
        temporary.write_text(str(server.server_address[1]))
        temporary.replace(options.port_file)
    print("stand-in: listening", flush=True)
    if "chatty" in behaviours:
        for number in range(20_000):
            print(f"line {number} " + "x" * 80, flush=number % 100 == 0)
    if "collect" in behaviours:
        threading.Thread(target=collect_for_ever, daemon=True).start()
    if "die-after-ready" in behaviours:
        time.sleep(0.5)
        print("stand-in: about to die", flush=True)
        os._exit(9)
    if "close-port" in behaviours:
        time.sleep(0.5)
        server.shutdown()
        server.server_close()
    stop = threading.Event()
    if "hang-on-stop" in behaviours:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
    stop.wait()
    print("stand-in: stopped", flush=True)


if __name__ == "__main__":
    main()
