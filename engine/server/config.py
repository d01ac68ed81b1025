"""What the HTTP server itself needs to know, beside the engine: `ServerConfig`, validated once. Its flags are in
`engine/server/args.py`, what the engine needs is in `engine/config.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from atom.engine.errors import ConfigError

MetricsDialect = Literal["atom", "vllm", "both"]

MIN_BODY_BYTES: Final = 1024
MAX_BODY_BYTES: Final = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """One API process."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one; see `port_file`."""
    port_file: Path | None = None
    """Where the bound port is written once the server is ready."""
    api_keys: tuple[str, ...] = ()
    """Any of them opens `/v1`; none: no key is asked for."""
    served_model_names: tuple[str, ...] = ()
    """Names in the API, the first is the one that responses carry; none: from the model."""
    metrics_dialect: MetricsDialect = "both"
    max_body_bytes: int = 16 << 20
    access_log: bool = False
    request_log: Path | None = None
    """One JSON line per finished completion is appended to it."""
    profile_dir: Path | None = None
    """Where `/start_profile` may write; None: profiling is off."""
    sim_vocab_from_tokenizer: bool = True
    """Whether the simulated executor takes its vocabulary from the tokenizer; cleared by `--sim-vocab-size`."""
    shutdown_timeout: float = 30.0
    """Seconds that open requests may take to finish after SIGTERM."""
    core_timeout: float = 300.0
    """Seconds for which a core may say nothing while it has requests in hand until the server calls itself unhealthy;
    0: any. A core reports every step, and on a CPU a large model's may take minutes."""
    timeout_keep_alive: int = 65
    """Seconds that an idle connection is kept. Above the 60 s that many clients and balancers keep theirs, so that it
    is they who close: a server that closes first makes their next request fail."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, got {self.port}")
        if not MIN_BODY_BYTES <= self.max_body_bytes <= MAX_BODY_BYTES:
            raise ConfigError(
                f"--max-body-bytes must be between {MIN_BODY_BYTES} and {MAX_BODY_BYTES}, got {self.max_body_bytes}"
            )
        if not 0.0 <= self.shutdown_timeout <= 86_400.0:
            raise ConfigError(f"--shutdown-timeout must be between 0 and 86400 seconds, got {self.shutdown_timeout}")
        if not 0.0 <= self.core_timeout <= 86_400.0:
            raise ConfigError(f"--core-timeout must be between 0 and 86400 seconds, got {self.core_timeout}")
        if not 0 <= self.timeout_keep_alive <= 86_400:
            raise ConfigError(
                f"--timeout-keep-alive must be between 0 and 86400 seconds, got {self.timeout_keep_alive}"
            )
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError("--api-key must be printable ASCII without spaces")
        for name in self.served_model_names:
            if not name or len(name) > 512 or not name.isprintable():
                raise ConfigError(f"--served-model-name must be 1 to 512 printable characters, got {name!r}")
