"""The real agents' programs: installed once from npm and PyPI, by package name, into the test cache (agents/<set>).

Versions are those that AGENTS.md's facts were measured with. MILAD_TEST_AGENTS says which a test run may use: "main" (claude, codex,
opencode: the default), "all" (scripts/test-agents), "none". What can't be installed skips its tests; with CI set it fails them.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

INSTALL_S = 900


@dataclass(frozen=True)
class Program:
    folder: str                              # of the set, in the cache
    packages: tuple[str, ...]                # all of the set
    main: bool = False
    bins: str = "node_modules/.bin"

    def bin(self, root: Path) -> Path:
        return root / self.folder / self.bins


_MAIN = ("@anthropic-ai/claude-code@2.1.332", "@openai/codex@0.171.0", "opencode-ai@1.18.33")
# Node 22: a newer one than the machine's comes with the set
_MORE = ("node@22", "@earendil-works/pi-coding-agent@1.6.0", "@qwen-code/qwen-code@0.24.4")
_GOOSE = f"@aaif/goose-binary-linux-{'arm64' if os.uname().machine == 'aarch64' else 'x64'}"
PROGRAMS = {
    "claude": Program("main", _MAIN, True), "codex": Program("main", _MAIN, True), "opencode": Program("main", _MAIN, True),
    "pi": Program("more", _MORE), "qwen": Program("more", _MORE), "aider": Program("aider", ("aider-chat==0.86.2",), bins="bin"),
    "copilot": Program("copilot", ("@github/copilot@1.0.102",)),
    "goose": Program("goose", (f"{_GOOSE}@1.52.0",), bins=f"node_modules/{_GOOSE}/bin"),
}


def chosen(name: str) -> bool:
    which = os.environ.get("MILAD_TEST_AGENTS", "main")
    return which == "all" or which == "main" and PROGRAMS[name].main


def folder(name: str, cache: Path) -> Path:
    """The folder for PATH where agent `name` lies, installed; skips (CI: fails) with the reason where it can't be."""
    if not chosen(name):
        pytest.skip(f"{name}: MILAD_TEST_AGENTS does not ask for it; scripts/test-agents runs all agents")
    program = PROGRAMS[name]
    why = _install(program, cache / "agents")
    if why:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{name} could not be installed: {why}")
    return program.bin(cache / "agents")


@functools.lru_cache(None)
def _install(program: Program, root: Path) -> str:
    """"" when the set is there; the reason where it is not. A stamp holds what was installed."""
    place, stamp = root / program.folder, root / f"{program.folder}.installed"
    wanted = " ".join(program.packages)
    root.mkdir(parents=True, exist_ok=True)
    with open(root / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.is_file() and stamp.read_text() == wanted:
            return ""
        stamp.unlink(missing_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        if program.folder == "aider":
            commands = [[sys.executable, "-m", "venv", str(place)],
                        [str(place / "bin" / "pip"), "install", "-q", "--disable-pip-version-check", *program.packages]]
        else:
            if not shutil.which("npm"):
                return "there is no npm (Debian: apt install npm)"
            # engine-strict off: claude-code asks for Node 22 but is a native binary
            commands = [["npm", "install", "--prefix", str(place), "--no-audit", "--no-fund", "--engine-strict=false",
                         "--update-notifier=false", "--loglevel=error", *program.packages]]
        for command in commands:
            try:
                done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=INSTALL_S)
            except (OSError, subprocess.TimeoutExpired) as e:
                return str(e)
            if done.returncode:
                return (done.stderr or done.stdout).strip()[-500:]
        stamp.write_text(wanted)
    return ""
