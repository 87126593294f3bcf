"""Command line: `python -m ptxsim {mutate,report,forms,timeline} …`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ptxsim import forms, mutate, report
from ptxsim.timeline import command as timeline

COMMANDS = {
    "mutate": (mutate, "take every wait, fence and barrier out of a kernel in turn, and see what a test notices"),
    "report": (report, "what a kernel consists of, without running it"),
    "forms": (forms, "the arithmetic forms that are supported, each with a test vector"),
    "timeline": (timeline, "when each warp and unit is busy, what waits for what, and the speed predicted for a chip"),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m ptxsim", description="Functional simulator of GPU kernels on a CPU.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=module.__doc__)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(command)
    arguments = parser.parse_args(argv)
    return COMMANDS[arguments.command][0].main(arguments)


if __name__ == "__main__":
    sys.exit(main())
