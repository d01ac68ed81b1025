"""The context of each single request as a gauge, for those who ask for it (`envs.METRICS_PER_REQUEST_CONTEXT`).

Reports of agentic loads draw one line per request from it. Each request leaves one series of each gauge behind for the
life of the process, so memory, the heap that the garbage collector walks and the time of a scrape grow with every
request served. Everything else in the server is of a size that does not depend on that.
"""

from __future__ import annotations

import threading
from typing import Final

from prometheus_client import Gauge

from atom.engine.api_sequence import ApiSequence

PREFILL_NAME: Final = "atom:prefill_request_context_tokens"
PREFILL_MEANING: Final = "prompt tokens of a request, set as it goes to the engine; never removed"
DECODE_NAME: Final = "atom:decode_request_context_tokens"
DECODE_MEANING: Final = "prompt and generated tokens of a request, as of the last scrape or its end; never removed"
LABELS: Final = ("request_id",)


class RequestContextGauges:
    """Two prometheus-client gauges. `submitted` and `ended` are the event loop's, `refresh` the rendering thread's."""

    def __init__(self) -> None:
        self.prefill = Gauge(PREFILL_NAME, PREFILL_MEANING, LABELS, registry=None)
        self.decode = Gauge(DECODE_NAME, DECODE_MEANING, LABELS, registry=None)
        self._open: dict[str, ApiSequence] = {}
        self._lock = threading.Lock()

    def submitted(self, request_id: str, seq: ApiSequence) -> None:
        """`request_id` must not have been used before."""
        self.prefill.labels(request_id).set(len(seq.prompt_token_ids))
        with self._lock:
            self._open[request_id] = seq

    def ended(self, request_id: str) -> None:
        """Set its last value. Does nothing the second time."""
        with self._lock:
            seq = self._open.pop(request_id, None)
            if seq is not None:
                self._set_decode(request_id, seq)

    def refresh(self) -> None:
        """Bring the gauge of what is being decoded up to date: per scrape, so that tokens cost nothing."""
        with self._lock:
            request_ids = list(self._open)
        for request_id in request_ids:
            with self._lock:  # or the last value of one that ends now could be overwritten
                seq = self._open.get(request_id)
                if seq is not None:
                    self._set_decode(request_id, seq)

    def _set_decode(self, request_id: str, seq: ApiSequence) -> None:
        if seq.num_output_tokens:
            self.decode.labels(request_id).set(len(seq.prompt_token_ids) + seq.num_output_tokens)
