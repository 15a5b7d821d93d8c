"""`python -m attlas` and the command `attlas`: the command line."""

from __future__ import annotations

import sys

from . import _native


def main() -> int:
    """Run the command line on the arguments of the process."""
    return _native.command_line(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
