"""`milad serve`: runs the daemon in the foreground."""

from __future__ import annotations

import argparse

from .. import log
from . import flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-c", "--config", metavar="FILE", help="milad.conf to read instead of the usual places")
    parser.epilog = ("exit codes: 0 ended as asked, 1 options, model or address are wrong, 2 the command line can't be read\n"
                     "signals: SIGTERM and SIGINT finish what runs and end, SIGUSR1 writes the engine's state to the log")
    flags.add(parser)


def run(parsed: argparse.Namespace) -> int:
    from .. import daemon
    options = flags.effective(parsed)
    log.setup(options["log_level"].value, options["log_format"].value)
    return daemon.serve(options)
