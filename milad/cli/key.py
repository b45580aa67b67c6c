"""`milad key add|list|remove`: the keys file. A new key is printed once, to stdout; the file keeps a salted hash of it."""

from __future__ import annotations

import argparse
import os
import sys

from .. import catalogue, keys
from ..errors import UsageError
from . import flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("add", "list", "remove"), help="what to do")
    parser.add_argument("name", nargs="?", help="whose key it is: letters, digits and . _ -")
    parser.add_argument("--parallel", type=int, default=0, metavar="N", help="answers that it may run at once (default: no limit)")
    parser.add_argument("--rpm", type=int, default=0, metavar="N", help="requests that it may send a minute (default: no limit)")
    parser.add_argument("--stdin", action="store_true", help="take the key from stdin instead of making one")
    parser.add_argument("-c", "--config", metavar="FILE", help="milad.conf to read")
    parser.epilog = ("A running daemon takes changes at SIGHUP (systemctl reload milad). The file is keys_file of milad.conf, "
                     "--keys-file, or keys beside the user's milad.conf.")
    flags.add(parser, ("keys_file",))


def run(parsed: argparse.Namespace) -> int:
    path = flags.effective(parsed)["keys_file"].value or str(catalogue.data_folder("CONFIG", ".config") / "keys")
    if parsed.action == "list":
        found = keys.load(path) if os.path.exists(path) else []
        for key in found:
            print(f"{key.name:<24} {f'parallel {key.parallel}' if key.parallel else '':<12} "
                  f"{f'{key.rpm} a minute' if key.rpm else ''}".rstrip())
        if not found:
            print(f"milad: no keys in {path}", file=sys.stderr)
        return 0
    if not parsed.name:
        raise UsageError(f"milad key {parsed.action} NAME: whose key?", 2)
    return _add(parsed, path) if parsed.action == "add" else _remove(parsed.name, path)


def _add(parsed: argparse.Namespace, path: str) -> int:
    for n, flag in ((parsed.parallel, "--parallel"), (parsed.rpm, "--rpm")):
        if not 0 <= n < 10_000_000:
            raise UsageError(f"flag {flag}: {n} is not between 0 and 9999999", 2)
    given = sys.stdin.readline().strip() if parsed.stdin else None
    entry, key = keys.make(parsed.name, given, parsed.parallel, parsed.rpm)

    def edit(lines: list[str]) -> list[str]:
        if any(k.name == entry.name for k in keys.parse("\n".join(lines), path)):
            raise UsageError(f"{path} has a key {entry.name} already; `milad key remove {entry.name}` takes it away")
        return [*lines, entry.line()]

    try:
        os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
    except OSError as e:
        raise UsageError(f"{e.filename}: {e.strerror}") from e
    keys.change(path, edit)
    if given is None:
        print(key)
        print(f"milad: this is the only time that the key is shown; {path} keeps a hash of it", file=sys.stderr)
    return 0


def _remove(name: str, path: str) -> int:
    def edit(lines: list[str]) -> list[str]:
        left = [line for line in lines if line.partition("#")[0].split()[:1] != [name]]
        if len(left) == len(lines):
            raise UsageError(f"{path} has no key {name[:64]!r}")
        return left

    keys.change(path, edit)
    return 0
