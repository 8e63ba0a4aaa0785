"""The ``flashcore`` command: ``python -m flashcore`` and the script of that name."""

from __future__ import annotations

import signal
import sys

from ._native import cli


def main() -> None:
    """Runs the command line and exits with its code."""
    # Python would only note an interrupt and wait for the extension to return.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(cli(["flashcore", *sys.argv[1:]], [sys.executable, "-m", "flashcore"]))


if __name__ == "__main__":
    main()
