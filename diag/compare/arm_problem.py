"""Why an arm's run came to nothing, in one line: from what its load wrote (`client.log`) and its server's log."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from atom.bench.redact import redact_text
from atom.bench.regular_file import read_tail
from atom.recipes.hints import address_in_use, describe_status

__all__ = ["complaint", "one_line", "port_was_taken", "telling_line"]

_LONGEST: Final = 300
_DIED: Final = re.compile(
    r"(?P<what>server|command prepare\[\d+\]) of (?:recipe|command) .{1,200}? died with (?P<status>.{1,40}?)"
    r" after [\d.]+ s(?P<when>, while it started)?(?:: .*)?; last lines of its log.*"
)
_UNDER_LOAD: Final = re.compile(
    r"the server died(?:: (?P<hint>.{1,300}?) \((?P<hinted>[^()]{1,40})\)| with (?P<status>.{1,40}?))(?:;.*)?"
)
"""What the verdict of a load begins with, where its server died."""
_EXCEPTION: Final = re.compile(
    r"(?:^|[\s\]:)])(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Exit|Interrupt)\b(?=:|$)"
)
_ERROR: Final = re.compile(r"(?:^|\W)(?:error|fatal|panic|cannot|not found|no such|killed|failed)(?:\W|$)", re.I)
_POINTS_ELSEWHERE: Final = re.compile(r"see (?:the )?(?:root cause|error|log|stack trace)s?\b|\babove\b", re.I)


def complaint(directory: Path, client_log: Path, status: int) -> str:
    """What went wrong in the run in `directory`, whose load ended with `status` (as in `subprocess.Popen.returncode`).
    Without secrets, in one line of at most 300 characters."""
    message = _error(read_tail(client_log))
    if message is None:
        return f"the load ended with {describe_status(status)}" + (" and said nothing" if status >= 0 else "")
    server_log = read_tail(directory / "server" / "server.log")
    if (match := _UNDER_LOAD.fullmatch(message)) is not None:
        # What a server writes last while it serves is mostly that it serves.
        said = match["hint"] or _error_line(server_log)
        died = f"the server died with {match['hinted'] or match['status']} under load"
        return one_line(died + (f": {said}" if said else ""))
    if (match := _DIED.fullmatch(message)) is None:
        return one_line(message)
    what, died = match["what"], f"died with {match['status']}{' while it started' if match['when'] else ''}"
    telling = telling_line(server_log)
    return one_line(f"the {what} {died}" + (f": {telling}" if telling else "; it wrote nothing"))


def port_was_taken(directory: Path, client_log: Path) -> bool:
    """Whether the server did not start because somebody else had its port."""
    server, said = read_tail(directory / "server" / "server.log"), _error(read_tail(client_log)) or ""
    return address_in_use(server[-40:]) or "is already in use" in said


def telling_line(lines: list[str]) -> str | None:
    """The line of a log that says most about why a program ended: the last exception, else the last line that speaks
    of an error, else the last one."""
    written = [line.strip() for line in lines if line.strip()]
    return _error_line(written) or (written[-1] if written else None)


def _error_line(lines: list[str]) -> str | None:
    written = [line.strip() for line in lines if line.strip()]
    own = [line for line in written if not _POINTS_ELSEWHERE.search(line)]
    for pattern in (_EXCEPTION, _ERROR):
        if found := next((line for line in reversed(own) if pattern.search(line)), None):
            return re.sub(r"^(?:error|fatal): ", "", found, flags=re.I)
    return None


def _error(lines: list[str]) -> str | None:
    """The last `error: …` that the load printed (`failed: …`: its verdict), without the lines that belong to it."""
    found = next((line for line in reversed(lines) if line.startswith(("error: ", "failed: "))), None)
    return None if found is None else found.partition(": ")[2]


def one_line(text: str, longest: int = _LONGEST) -> str:
    """Without secrets and control characters, cut after so many characters."""
    text = redact_text("".join(one if one.isprintable() else " " for one in text))
    return text if len(text) <= longest else text[: longest - 1] + "…"
