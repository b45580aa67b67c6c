"""The `milad` program: finds the command and runs it. Answers go to stdout, everything else to stderr.

Exit codes: 0 fine, 1 something is wrong with the options, files or surroundings, 2 the command line can't be read,
3 no answer (the server or the model failed), 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from typing import Any, Sequence

from .. import __version__
from ..errors import UsageError

# name -> (module, one line). Modules are imported only when asked for: start-up time counts.
COMMANDS = {
    "serve": ("serve", "run the daemon (what `milad` alone does)"),
    "launch": ("launch", "run a coding agent on the model"),
    "doctor": ("doctor", "find out what is wrong"),
    "ask": ("ask", "ask the model one question"),
    "pull": ("pull", "fetch a model"),
    "models": ("models", "list, show or remove the models that are here"),
    "cache": ("cache", "list or prune the prompts kept on disk"),
    "bench": ("bench", "measure a model on this machine"),
    "key": ("key", "add, list or remove API keys"),
    "top": ("top", "watch a running daemon"),
    "help": ("help", "show a manual page"),
    "completion": ("completion", "print a shell's completion script"),
}


class Parser(argparse.ArgumentParser):
    """argparse without abbreviated flags: what works today must not change its meaning with tomorrow's options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str):  # type: ignore[override]
        self.print_usage(sys.stderr)
        self.exit(2, f"milad: {message}\n")


def build(command: str | None) -> Parser:
    """The parser; only `command`'s own options are filled in (None: all commands' names, for --help)."""
    parser = Parser(prog="milad", description="A local language model that speaks the cloud's APIs.",
                    epilog="`milad COMMAND --help` tells each command's options. `milad` alone serves.",
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"milad {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, (module, line) in COMMANDS.items():
        sub = commands.add_parser(name, help=line, description=line[0].upper() + line[1:] + ".",
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
        if name == command:
            loaded = importlib.import_module(f".{module}", __package__)
            loaded.add_arguments(sub)
            sub.set_defaults(run=loaded.run)
    return parser


def flags_of(parser: Parser, command: str | None) -> list[str]:
    """The spellings of a command's flags."""
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return [s for a in (commands.choices[command] if command in COMMANDS else parser)._actions for s in a.option_strings]


def main(argv: Sequence[str] | None = None) -> int:
    _standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    first = next((a for a in arguments if not a.startswith("-")), None)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help", "--version")):
        arguments.insert(0, "serve")          # `milad --port 9000` serves
        first = "serve"
    rest: list[str] = []
    if first == "launch" and "--" in arguments:
        at = arguments.index("--")
        arguments, rest = arguments[:at], arguments[at + 1:]      # another program's own: not argparse's to read
    try:
        parser = build(first if first in COMMANDS else None)
        parsed, unknown = parser.parse_known_args(arguments)
        if unknown:
            near = difflib.get_close_matches(unknown[0].partition("=")[0], flags_of(parser, first), n=1, cutoff=0.75)
            parser.error(f"unrecognized arguments: {' '.join(unknown)}" + (f"; did you mean {near[0]}?" if near else ""))
        if parsed.command is None:
            build(None).print_help(sys.stderr)
            return 2
        parsed.rest = rest
        return parsed.run(parsed)
    except UsageError as e:
        print(f"milad: {e}", file=sys.stderr)
        return e.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:                   # `milad ask ... | head -1`
        _drop_stdout()
        return 0
    except OSError as e:                      # a full disk, mostly: files that an option names have errors of their own
        print(f"milad: {e.filename + ': ' if isinstance(e.filename, str) else ''}{e.strerror or e}", file=sys.stderr)
        _drop_stdout()
        return 1


def _standard_streams() -> None:
    """Descriptors 0 to 2 exist: else the next file or socket would become one, and Python's sys.stdout is None."""
    for fd, name, flags in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_WRONLY), (2, "stderr", os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, flags)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "r" if fd == 0 else "w", encoding="utf-8", errors="replace", closefd=False))


def _drop_stdout() -> None:
    """What is still buffered can't be written; the flush at exit must not fail over it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    sys.exit(main())
