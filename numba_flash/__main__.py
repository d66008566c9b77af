"""``python -m numba_flash info`` shows what this installation can do, ``selftest`` checks that it does it right, ``warmup`` compiles
kernels ahead of their first use, ``bench`` measures how fast they are; ``--version`` says which one it is.
"""

import argparse
import sys

from numba_flash import __version__, diagnose, warmup
from numba_flash.bench import command


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 1 if `selftest` or `bench` found a wrong result, or `warmup` could not compile all it should."""
    parser = argparse.ArgumentParser(prog="python -m numba_flash", description=__doc__)
    parser.add_argument("--version", action="version", version=f"numba_flash {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="info | selftest | warmup | bench")
    commands.add_parser("info", help="versions, devices, backends and why one cannot run, caches of compiled kernels")
    commands.add_parser("selftest", help="every backend and dtype against the float64 oracle")
    kernels = commands.add_parser("warmup", help="compile kernels ahead of their first use, here or for a GPU that is elsewhere")
    warmup.add_options(kernels)
    bench = commands.add_parser("bench", help="speed, beside the other libraries that are installed")
    command.add_options(bench)
    options = parser.parse_args(arguments)
    if options.command == "info":
        diagnose.show_config()
        return 0
    if options.command == "selftest":
        return 0 if diagnose.selftest() else 1
    if options.command == "warmup":
        return warmup.run(options, kernels)
    return command.run(options, bench)


if __name__ == "__main__":
    sys.exit(main())
