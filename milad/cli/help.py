"""`milad help TOPIC`: the manual pages that come with the program, through the system's own viewer where there is one."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from ..errors import UsageError
from . import main as program

PAGES = {"milad": "milad.1", "daemon": "milad.8", "conf": "milad.conf.5"}
ALIASES = {"milad.1": "milad", "milad.8": "daemon", "milad.conf": "conf", "milad.conf.5": "conf", "config": "conf", "serve": "daemon",
           "signals": "daemon", "metrics": "daemon", "options": "conf"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", nargs="?", default="milad", help="milad (the commands), daemon (running it), conf (every option), or "
                        "a command's name")


def page(topic: str) -> Path:
    """The page's file: in the package, else in the source tree beside it."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "man", package.parent / "man"):
        if (folder / PAGES[topic]).is_file():
            return folder / PAGES[topic]
    raise UsageError(f"the page {PAGES[topic]} did not come with this program")


def run(parsed: argparse.Namespace) -> int:
    topic = ALIASES.get(parsed.topic, parsed.topic)
    if topic in program.COMMANDS and topic not in PAGES:
        program.build(topic).parse_args([topic, "--help"])
    if topic not in PAGES:
        raise UsageError(f"there is no page on {parsed.topic[:60]!r}; there are {', '.join(PAGES)} and the commands "
                         f"{', '.join(program.COMMANDS)}", 2)
    path = page(topic)
    for viewer in (["man", "-l"], ["mandoc", "-a"], ["groff", "-mdoc", "-Tutf8"]):
        if shutil.which(viewer[0]):
            environment = dict(os.environ, **({} if sys.stdout.isatty() else {"MANPAGER": "cat", "PAGER": "cat"}))
            if subprocess.run([*viewer, str(path)], env=environment).returncode == 0:
                return 0
    print(plain(path.read_text("utf-8")))
    return 0


def plain(source: str) -> str:
    """The page's words without a formatter: its macros away, its headings kept."""
    lines = []
    for line in source.splitlines():
        if line.startswith('.\\"'):
            continue
        if line.startswith((".Sh ", ".Ss ")):
            lines += ["", line[4:].strip('"')]
        elif line.startswith(".It"):
            words = [w for w in line[3:].split() if w not in _MACROS]
            lines += ["", "  " + " ".join(words)]
        elif line.startswith("."):
            words = [w for w in line[1:].split() if w not in _MACROS]
            if words:
                lines.append("      " + " ".join(words).replace(" .", ".").replace(" ,", ","))
        elif line:
            lines.append("      " + line)
    return "\n".join(lines).replace("\\-", "-").replace("\\&", "").replace("\\e", "\\").strip()


_MACROS = {"Nm", "Nd", "Dd", "Dt", "Os", "Fl", "Ar", "Op", "Pa", "Cm", "Ic", "Ev", "Xr", "Sx", "Li", "Ql", "Dq", "Sq", "Bl", "El",
           "-tag", "-width", "Ds", "-compact", "-offset", "indent", "Bd", "Ed", "-literal", "Pp", "Ns", "No", "Em", "Sy", "Er", "Dv", "Va",
           "Brq", "Oo", "Oc", "Ex", "-std", "-column", "Ta", "It"}
