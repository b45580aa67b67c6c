"""`milad models`: what lies in the models folder, and what can be fetched."""

from __future__ import annotations

import argparse
import json
import sys

from .. import catalogue


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as one JSON array")


def run(parsed: argparse.Namespace) -> int:
    have = catalogue.installed()
    if parsed.json:
        print(json.dumps([{"name": f.name, "path": str(f.path), "bytes": f.n_bytes} for f in have]))
        return 0
    width = max((len(f.name) for f in have), default=0)
    for found in have:
        print(f"{found.name:<{width}}  {found.n_bytes / 1e6:8.0f} MB  {found.path}")
    if not have:
        print(f"no models in {catalogue.models_folder()}", file=sys.stderr)
    for entry in catalogue.CATALOGUE:
        if entry.name not in {f.name for f in have}:
            print(f"`milad pull {entry.name}` fetches {entry.about} ({entry.n_bytes / 1e6:.0f} MB, {entry.licence})",
                  file=sys.stderr)
    return 0
