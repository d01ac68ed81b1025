"""What goes wrong in an agreement.

AtomEngineError
└── AgreementError
    ├── VoteError             a vote or timeout that the rules forbid: changed, too late, of an unknown rank or code
    ├── ProtocolError         a message that no correct peer sends
    ├── AgreementClosedError  used after its close began
    ├── AgreementFullError    too many rounds are open; admit less
    ├── AgreementStalledError a round made no progress in time: names it and who has not voted; every rank raises it
    └── ModeMismatchError     ranks started with different protocol versions or modes; every rank raises it
"""

from __future__ import annotations

from atom.engine.errors import AtomEngineError

__all__ = [
    "AgreementClosedError",
    "AgreementError",
    "AgreementFullError",
    "AgreementStalledError",
    "ModeMismatchError",
    "ProtocolError",
    "VoteError",
]


class AgreementError(AtomEngineError):
    """Root of the agreement's errors. After any of them but VoteError and AgreementFullError the agreement is over."""


class VoteError(AgreementError):
    """A vote or timeout that the rules forbid. Nothing was recorded or sent."""


class ProtocolError(AgreementError):
    """A message that no correct peer sends."""


class AgreementClosedError(AgreementError):
    """Published after the close began."""


class AgreementFullError(AgreementError):
    """Too many rounds are open on this rank. Nothing was recorded; publish again after a commit."""


class AgreementStalledError(AgreementError):
    """No progress within the deadline."""


class ModeMismatchError(AgreementError):
    """Ranks disagree on what they run. Raised after the exchange, so that no rank is left waiting in it."""
