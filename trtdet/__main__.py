"""Where the program ``trtdet`` begins, also as ``python -m trtdet``."""

from __future__ import annotations

import signal
import sys

# While modules are imported there is nothing to clean up: Ctrl-C ends the process as it ends any other. Whoever ignores
# it, such as a job in the background, goes on ignoring it.
_HANDLER = signal.getsignal(signal.SIGINT)
if _HANDLER is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run() -> int:
    """Runs the command line with the arguments of the process; returns its exit code."""
    from trtdet.cli import main

    signal.signal(signal.SIGINT, _HANDLER)
    try:
        return main()
    except KeyboardInterrupt:  # before the command has begun
        print("trtdet: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(run())
