"""`milad serve`: runs the daemon in the foreground; -t and -T only look at its configuration."""

from __future__ import annotations

import argparse
import sys

from .. import log, options
from . import flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-c", "--config", metavar="FILE", help="milad.conf to read instead of the usual places")
    parser.add_argument("-t", "--test", action="store_true", help="check configuration, model, keys and certificate, and end")
    parser.add_argument("-T", "--show", action="store_true", help="print the effective configuration and where each value is "
                        "from, and end")
    parser.epilog = ("exit codes: 0 ended as asked, 1 options, files, model or address are wrong, 2 the command line can't be "
                     "read,\n            3 asked twice to end: running answers were cut\n"
                     "signals: SIGTERM and SIGINT finish what runs and end, SIGHUP reads the configuration again,\n"
                     "         SIGUSR1 writes the engine's state to the log")
    flags.add(parser)


def run(parsed: argparse.Namespace) -> int:
    notes: list[str] = []
    values = flags.effective(parsed, notes)
    if parsed.show or parsed.test:
        for line in notes:
            print(f"milad: {line}", file=sys.stderr)
    if parsed.show:
        sys.stdout.write(options.effective_text(values))
        return 0
    from .. import daemon
    if parsed.test:
        for line in daemon.check(values):
            print(f"milad: {line}", file=sys.stderr)
        print("milad: the configuration is fine", file=sys.stderr)
        return 0
    log.setup(values["log_level"].value, values["log_format"].value, path=values["log_file"].value)
    for note in notes:
        log.logger.warning("%s", note)
    return daemon.serve(values, reread=lambda: flags.effective(parsed))
