"""`mmldlm demo RUN`: a web page on this machine, to sample from a run by hand."""

from __future__ import annotations

import argparse
import errno
from pathlib import Path

from mmldlm.errors import ExitCode, UsageError
from mmldlm.optim.ema import add_weights_option
from mmldlm.run.load import load_run
from mmldlm.tools.demo.api import Api
from mmldlm.tools.demo.server import DemoServer

PORT = 8000
PRIVILEGED = 1024  # ports below are not for users, and 80 would go without a number in the name of the host


def main(argv: list[str] | None = None) -> int:
    """Serves until it is interrupted."""
    parser = argparse.ArgumentParser("mmldlm demo", description=__doc__)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--port", type=int, default=PORT, help="0: a free one; default: %(default)s")
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint's folder; default: the newest good one")
    parser.add_argument("--data", help="data store, where it is no longer at the config's data.path")
    add_weights_option(parser)
    options = parser.parse_args(argv)
    if options.port and not PRIVILEGED <= options.port < 2**16:
        raise UsageError(f"--port: expected 0 or {PRIVILEGED} to {2**16 - 1}, found {options.port}")
    api = Api(load_run(options.run, options.checkpoint, options.data, options.weights))
    try:
        server = DemoServer(api, options.port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise UsageError(f"--port: {options.port} is in use, expected a free one, or 0 to find one") from None
    with server:
        print(f"{options.run}, {api.run}: open http://127.0.0.1:{server.port}/ (Ctrl-C ends)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return ExitCode.INTERRUPTED
    return ExitCode.DONE
