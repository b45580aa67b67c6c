"""`milad completion bash|zsh|fish`: a completion script from the same parsers that read the command line.

    eval "$(milad completion bash)"          # in ~/.bashrc
"""

from __future__ import annotations

import argparse
import sys
from typing import Iterator, NamedTuple

from . import main as program

FILE_METAVARS = {"FILE", "DIR", "FILE|NAME"}


class Flag(NamedTuple):
    names: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...]
    files: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="whose script to print")
    parser.epilog = ("bash: eval \"$(milad completion bash)\"\nzsh:  eval \"$(milad completion zsh)\" (after compinit)\n"
                     "fish: milad completion fish | source")


def flags(command: str) -> list[Flag]:
    """A command's flags, as its parser knows them."""
    parser = program.build(command)
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    found = []
    for action in commands.choices[command]._actions:
        if action.option_strings:
            choices = tuple(map(str, action.choices or ()))
            metavar = str(action.metavar or "")
            if metavar.startswith("{"):
                choices = tuple(metavar.strip("{}").split(","))
            text = (action.help or "").replace("%%", "%").partition(" (default")[0]
            found.append(Flag(tuple(action.option_strings), text, action.nargs != 0, choices, metavar in FILE_METAVARS))
    return found


def words(command: str) -> tuple[str, ...]:
    """What may stand after a command besides flags."""
    parser = program.build(command)
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return tuple(str(c) for a in commands.choices[command]._actions if not a.option_strings and a.choices for c in a.choices)


def _bash() -> Iterator[str]:
    yield "_milad() {"
    yield '  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]:-}'
    yield "  COMPREPLY=()"
    yield f'  if [ "$COMP_CWORD" -eq 1 ]; then COMPREPLY=($(compgen -W "{" ".join(program.COMMANDS)} --help --version" -- "$word")); return; fi'
    yield "  case $command in"
    for command in program.COMMANDS:
        yield f"  {command})"
        yield "    case $before in"
        for flag in flags(command):
            if flag.choices:
                yield f'    {"|".join(flag.names)}) COMPREPLY=($(compgen -W "{" ".join(flag.choices)}" -- "$word")); return ;;'
            elif flag.files:
                yield f'    {"|".join(flag.names)}) COMPREPLY=($(compgen -f -- "$word")); return ;;'
            elif flag.takes_value:
                yield f'    {"|".join(flag.names)}) return ;;'
        yield "    esac"
        names = [n for f in flags(command) for n in f.names] + list(words(command))
        yield f'    COMPREPLY=($(compgen -W "{" ".join(names)}" -- "$word")) ;;'
    yield "  esac"
    yield "}"
    yield "complete -o default -F _milad milad milad.pyz"


def _escaped(text: str, characters: str) -> str:
    return "".join("\\" + c if c in characters else c for c in text)


def _zsh() -> Iterator[str]:
    yield "#compdef milad milad.pyz"
    yield "_milad() {"
    yield "  local -a commands"
    yield "  commands=("
    for name, (_, line) in program.COMMANDS.items():
        yield f"    {_single(name + ':' + line)}"
    yield "  )"
    yield "  if (( CURRENT == 2 )); then _describe command commands; return; fi"
    yield "  case $words[2] in"
    for command in program.COMMANDS:
        yield f"  {command}) shift words; (( CURRENT-- )); _arguments -s \\"
        for flag in flags(command):
            for name in flag.names:
                value = ""
                if flag.choices:
                    value = f":value:({' '.join(flag.choices)})"
                elif flag.files:
                    value = ":file:_files"
                elif flag.takes_value:
                    value = ":value: "
                yield f"    {_single(name + '[' + _escaped(flag.help, '[]:') + ']' + value)} \\"
        yield f"    {_single('*:word:(' + ' '.join(words(command)) + ')' if words(command) else '*:file:_files')} ;;"
    yield "  esac"
    yield "}"
    yield "# autoloaded from $fpath this file is the function's first call"
    yield 'if [[ ${funcstack[1]-} == _milad ]]; then _milad "$@"; else compdef _milad milad milad.pyz; fi'


def _single(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fish() -> Iterator[str]:
    yield "complete -c milad -f -n __fish_use_subcommand -s h -l help -d 'Show help'"
    yield "complete -c milad -f -n __fish_use_subcommand -l version -d 'Show the version'"
    for name, (_, line) in program.COMMANDS.items():
        yield f"complete -c milad -f -n __fish_use_subcommand -a {name} -d {_fish_quoted(line)}"
    for command in program.COMMANDS:
        condition = f"'__fish_seen_subcommand_from {command}'"
        for flag in flags(command):
            names = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in flag.names)
            value = f" -xa {_fish_quoted(' '.join(flag.choices))}" if flag.choices else " -rF" if flag.files else " -x" if flag.takes_value else " -f"
            yield f"complete -c milad -n {condition} {names}{value} -d {_fish_quoted(flag.help)}"
        if words(command):
            yield f"complete -c milad -f -n {condition} -a {_fish_quoted(' '.join(words(command)))}"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def script(shell: str) -> str:
    return "\n".join({"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]()) + "\n"


def run(parsed: argparse.Namespace) -> int:
    sys.stdout.write(script(parsed.shell))
    return 0
