"""`docker` for tests, without containers: what is "run" is a process of this machine in a session of its own.

Knows `run`, `stop`, `rm`, `ps` and `inspect` as far as the project uses them. Containers are files in $FAKE_DOCKER.
Standard library only; run by path.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STATE = Path(os.environ["FAKE_DOCKER"])
WITH_VALUE = ("--name", "--label", "--env", "--network", "--ipc", "--volume", "--cpuset-cpus", "--workdir", "--gpus")


def run(words: list[str]) -> int:
    options: dict[str, list[str]] = {}
    while words[0].startswith("-"):
        flag = words.pop(0)
        if flag == "--entrypoint":
            assert words.pop(0) == ""
        elif flag in WITH_VALUE:
            options.setdefault(flag, []).append(words.pop(0))
        else:
            assert flag in ("--rm", "--init"), flag
    image, command = words[0], words[1:]
    for volume in options.get("--volume", []):
        assert Path(volume.partition(":")[0]).exists(), volume
    env = {name: value for name, value in os.environ.items() if not name.startswith("ATOM_")}
    env |= dict(one.split("=", 1) for one in options.get("--env", []) if "=" in one)
    process = subprocess.Popen(command, env=env, start_new_session=True)
    record = STATE / options["--name"][0]
    labels = dict(one.split("=", 1) for one in options["--label"])
    record.write_text(json.dumps({"pid": process.pid, "labels": labels, "image": image, "options": options}))
    (STATE / "started.jsonl").open("a").write(record.read_text() + "\n")
    signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    status = process.wait()
    record.unlink(missing_ok=True)
    return status if status >= 0 else 128 - status


def end(name: str, number: int, patience_s: float) -> bool:
    try:
        pid = json.loads((STATE / name).read_text())["pid"]
    except OSError:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            os.killpg(pid, 0)
            time.sleep(0.02)
    return True


def containers() -> list[Path]:
    return [path for path in STATE.iterdir() if path.suffix != ".jsonl"]


def main() -> int:
    verb, *words = sys.argv[1:]
    if verb == "run":
        return run(words)
    if verb == "image":
        assert words[0] == "inspect"
        if "unknown" in words[1]:
            print("[]")
            return 1
        print(json.dumps([{"Id": "sha256:feed", "RepoDigests": ["registry.example/server@sha256:beef"]}]))
        return 0
    if verb == "stop":
        assert words[0] == "-t"
        return 0 if end(words[2], signal.SIGTERM, float(words[1])) else 1
    if verb == "rm":
        found = end(words[1], signal.SIGKILL, 0.5)
        (STATE / words[1]).unlink(missing_ok=True)
        return 0 if found else 1
    if verb == "ps":
        print("\n".join(path.name for path in containers()))
        return 0
    assert verb == "inspect"
    for name in words[2:]:
        print(json.dumps(json.loads((STATE / name).read_text())["labels"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
