"""What servers that others wrote call their processes, and where they keep their Prometheus text.

From their sources: vLLM sets the process titles `VLLM::APIServer_n`, `VLLM::EngineCore_DPn`, `VLLM::Worker_TPn` and
`VLLM::DPCoordinator`, SGLang `sglang::scheduler_TPn`, `sglang::detokenizer`, `sglang::data_parallel_controller`,
`sglang::tokenizer_worker:PID`, `sglang::gpu_worker`. TensorRT-LLM sets none: its executor runs in mpi4py's pool, whose
ranks show `mpi4py.futures.server`. `transformers serve` is one process. What only passes work on (the coordinator, the
controller) is neither core nor worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from atom.recipes.recipe import MetricsDialect, Roles

__all__ = ["KNOWN_ROLES", "METRICS_PATHS"]

KNOWN_ROLES: Final = Roles(
    api=(
        r"atom\.engine\.server",
        r"atom\.entrypoints",
        r"vllm\.entrypoints",
        r"\bvllm serve\b",
        r"VLLM::APIServer",
        r"sglang\.launch_server",
        r"\bsglang serve\b",
        r"sglang::(?:tokenizer_worker|server)",
        r"\btrtllm-serve\b",
        r"tensorrt_llm\.commands\.serve",
        r"\btransformers(?:-cli)? serve\b",
        r"\bllama_cpp\.server\b",
    ),
    core=(
        r"atom\.engine\.core_process",
        r"(?:VLLM::|^)EngineCore",
        r"sglang::\w*scheduler",
    ),
    worker=(
        r"VLLM::Worker",
        r"atom\.engine\.worker",
        r"sglang::(?:detokenizer|gpu_worker|async_draft_runner)",
        r"mpi4py\.futures\.server",
        r"mpi_session|mgmn_worker_node",
        r"ray::\w*Worker",
    ),
)
"""For servers that were not started from a recipe of their own."""

METRICS_PATHS: Final[Mapping[MetricsDialect, tuple[str, ...]]] = {
    "atom": ("/metrics",),
    "vllm": ("/metrics",),
    "sglang": ("/metrics",),
    # Its /metrics is JSON, and reading it takes statistics away from whoever else reads them: never asked.
    "trtllm": ("/prometheus/metrics",),
    "auto": ("/metrics", "/prometheus/metrics"),
}
"""Where to look for the text, in this order."""
