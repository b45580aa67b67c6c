"""The environment and the core that this checkout's programs measure and test with, made when they aren't there yet."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


class BuildError(Exception):
    """A tool is missing or the build failed; the text says which, with the end of the compiler's output."""


class NoTool(BuildError):
    """Nothing to build with; a test may be skipped for it."""


def environment() -> None:
    """Goes on in .venv, made or brought up to date first: this process runs its command anew under .venv's Python."""
    if Path(sys.prefix).resolve() == (ROOT / ".venv").resolve():
        return
    if subprocess.run([ROOT / "scripts" / "setup", "--test"]).returncode:
        sys.exit(1)
    python = str(ROOT / ".venv" / "bin" / "python")
    os.execv(python, [python, *sys.argv])


def tool(name: str) -> str | None:
    """A program of this Python's environment, else of PATH; None where there is none."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def library() -> Path:
    """libmilad.so: what MILAD_LIBRARY names, else native/ built into build/test (brought up to date, seconds when nothing changed).
    MILAD_LIBRARY is set to it, so that milad.capi and child processes load the same. Raises BuildError, NoTool."""
    named = os.environ.get("MILAD_LIBRARY")
    if named:
        return Path(named)
    cmake, ninja = tool("cmake"), tool("ninja")
    if not cmake:
        raise NoTool("no cmake to build native/ with: run scripts/setup")
    build = ROOT / "build" / "test"
    configure: list[object] = [cmake, "-S", ROOT / "native", "-B", build, "-DMILAD_TESTS=ON"]
    if ninja and not (build / "CMakeCache.txt").exists():        # a folder keeps the generator that it began with
        configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    if not (build / "libmilad.so").exists():
        print(f"building the core into {build}", file=sys.stderr, flush=True)
    for command in (configure, [cmake, "--build", build, "--parallel", os.cpu_count() or 1]):
        words = [str(c) for c in command]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            raise BuildError(f"{' '.join(words)}:\n{(done.stdout + done.stderr)[-4000:]}")
    os.environ["MILAD_LIBRARY"] = str(build / "libmilad.so")
    return build / "libmilad.so"
