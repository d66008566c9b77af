"""``python -m numba_flash info`` shows what this installation can do, ``selftest`` checks that it does it right."""

import argparse
import sys

from numba_flash import diagnose


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 1 if the self-test found a wrong result."""
    parser = argparse.ArgumentParser(prog="python -m numba_flash", description=__doc__)
    parser.add_argument("command", choices=("info", "selftest"))
    if parser.parse_args(arguments).command == "info":
        diagnose.show_config()
        return 0
    return 0 if diagnose.selftest() else 1


if __name__ == "__main__":
    sys.exit(main())
