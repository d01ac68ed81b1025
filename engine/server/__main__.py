"""`python -m atom.engine.server`: the API process. Flags: `engine/server/args.py`; what it does:
`engine/server/serve.py`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from atom.engine.server.args import parse_args


def main(argv: Sequence[str] | None = None) -> int:
    engine_config, server_config = parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s api %(asctime)s %(message)s")
    # uvicorn's own lines say what ours say; malformed requests would fill the log.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    # "socket.send() raised exception": a client left between two events. It happens all the time.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    # A thread that wants the GIL asks for it after this long. /metrics renders for some 10 ms in a thread: with the
    # default of 5 ms every engine step in that time would wait as long.
    sys.setswitchinterval(0.001)
    from atom.engine.server.serve import run  # after --help, which needs none of it

    return run(engine_config, server_config)


if __name__ == "__main__":
    sys.exit(main())
