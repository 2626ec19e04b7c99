"""`python -m nanovllm`, and the program `nanovllm`: a command line as this process."""

import sys
from typing import NoReturn

from nanovllm.jobs import main
from nanovllm.jobs.errors import caught_signals


def program() -> NoReturn:
    """Run the command line of this process, and end it with the exit code."""
    with caught_signals() as signals:
        try:
            code = main.main()
        except KeyboardInterrupt:
            code = signals.end[0]
        finally:
            signals.ignore()
    sys.exit(code)


if __name__ == "__main__":
    program()
