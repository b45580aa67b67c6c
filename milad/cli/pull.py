"""`milad pull NAME`: fetches a model of the catalogue."""

from __future__ import annotations

import argparse
import sys

from .. import catalogue


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default=catalogue.DEFAULT.name,
                        help=f"a name of the catalogue: {', '.join(catalogue.BY_NAME)} (default: {catalogue.DEFAULT.name})")


def run(parsed: argparse.Namespace) -> int:
    path = catalogue.pull(parsed.name, say=lambda line: print(f"milad: {line}", file=sys.stderr))
    print(path)
    return 0
