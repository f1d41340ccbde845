"""The program: `spmd-lm`, or `python -m spmd_lm`."""

import signal
import sys


def main() -> int:
    """Runs this process's command line, and returns its exit code."""
    # Outside of our handlers, as during the imports below and at exit, Ctrl-C ends the process without a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from spmd_lm import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
