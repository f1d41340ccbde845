"""The program: `spmd-lm`, or `python -m spmd_lm`."""

import signal
import sys


def main() -> int:
    """Runs this process's command line, and returns its exit code."""
    # Where nobody answers Ctrl-C, as during the imports below and while Python ends, it ends the process: no traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from spmd_lm import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
