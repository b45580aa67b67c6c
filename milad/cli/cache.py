"""`milad cache`: what the disk tier of the prompt cache holds, and less of it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

from .. import catalogue
from ..engine import disk
from ..errors import UsageError
from ..options import BY_NAME, convert
from . import flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = ("examples:\n  milad cache                 list the folders: one per model, KV type and build of the core\n"
                     "  milad cache prune 1G        remove the longest unused prompts until 1 GiB is left\n"
                     "  milad cache prune 0         remove all of them")
    parser.add_argument("action", nargs="?", choices=("list", "prune"), default="list", help="what to do (default: list)")
    parser.add_argument("size", nargs="?", metavar="SIZE", help="prune to this size (default: the option kv_cache_disk)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("-c", "--config", metavar="FILE", help="milad.conf to read")
    flags.add(parser, ("kv_cache_dir", "kv_cache_disk"))


def run(parsed: argparse.Namespace) -> int:
    options = flags.effective(parsed)
    root = os.fspath(options["kv_cache_dir"].value or catalogue.data_folder("CACHE", ".cache") / "kv")
    if parsed.action == "prune":
        return _prune(root, parsed, options["kv_cache_disk"].value)
    if parsed.size:
        raise UsageError("a size goes with `milad cache prune`", 2)
    found = disk.survey(root)
    if parsed.json:
        print(json.dumps({"folder": root, "models": found}))
        return 0
    for row in found:
        age = time.time() - row["newest"]
        print(f"{catalogue.size_text(row['n_bytes']):>8}  {row['n_files']:6} files  last used {_ago(age)}  {row['name']}")
    total = sum(r["n_bytes"] for r in found)
    print(f"{root}: {catalogue.size_text(total)} of at most {catalogue.size_text(options['kv_cache_disk'].value)}", file=sys.stderr)
    return 0


def _prune(root: str, parsed: argparse.Namespace, cap: int) -> int:
    size: Any = cap if parsed.size is None else convert(BY_NAME["kv_cache_disk"], parsed.size, "milad cache prune")
    left, removed = disk.prune(root, size)
    if parsed.json:
        print(json.dumps({"folder": root, "bytes": left, "removed": removed}))
    else:
        print(f"milad: removed {removed} files, {catalogue.size_text(left)} are left in {root}", file=sys.stderr)
    return 0


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"
