"""`milad doctor`: what is wrong, and what to do about it."""

from __future__ import annotations

import argparse
import json
import os
import sys

from ..agents import target as targets

MARKS = {"ok": "ok  ", "note": "    ", "warn": "warn", "bad": "BAD "}
COLOURS = {"ok": "32", "warn": "33", "bad": "31"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", help="the server to check (default: $MILAD_URL, else the kind's usual address)")
    parser.add_argument("--kind", metavar="KIND", help="what should serve there: " + ", ".join(targets.KINDS))
    parser.add_argument("--model", metavar="NAME", help="the model to ask (default: the first one served)")
    parser.add_argument("--api-key-env", metavar="NAME", help="the variable that holds the server's key")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.epilog = "exit codes: 0 nothing is wrong (warnings aside), 1 something is"


def run(parsed: argparse.Namespace) -> int:
    from .. import doctor
    kind = targets.kind_of(parsed.kind) if parsed.kind else None
    url = parsed.url or (os.environ.get("MILAD_URL") if kind is None or kind.name == "milad" else "")
    root = targets.root_of(url or (kind or targets.KINDS["milad"]).url)
    found = []
    for part in (doctor.local(os.environ), doctor.server(kind, root, model=parsed.model, key_env=parsed.api_key_env,
                                                         environ=os.environ)):
        for finding in part:
            found.append(finding)
            if not parsed.json:
                _show(finding)
    wrong = [f for f in found if f.state == "bad"]
    if parsed.json:
        print(json.dumps({"ok": not wrong, "findings": [f.as_dict() for f in found]}, indent=2))
    else:
        n_warned = sum(f.state == "warn" for f in found)
        print(f"\n{len(wrong) or 'nothing'} wrong" + (f", {n_warned} warnings" if n_warned else ""))
    return 1 if wrong else 0


def _show(finding) -> None:
    mark = MARKS[finding.state]
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ and finding.state in COLOURS:
        mark = f"\x1b[{COLOURS[finding.state]}m{mark}\x1b[0m"
    print(f"{mark} {finding.name:<22} {finding.said}", flush=True)
    if finding.do:
        print(f"{'':<28}-> {finding.do}", flush=True)
