"""The zipapp that scripts/zipapp made: what is in it, and that another Python gets one line. Needs dist/milad.pyz."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import milad

ROOT = Path(milad.__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def zipapp() -> Path:
    path = ROOT / "dist" / "milad.pyz"
    if not path.is_file():
        pytest.skip("no dist/milad.pyz: scripts/zipapp makes it")
    return path


def names(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as z:
        return {n.removeprefix("site-packages/") for n in z.namelist()}


def test_holds_the_program_and_nothing_for_building(zipapp: Path) -> None:
    found = names(zipapp)
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "milad").rglob("*.py")}
    assert modules | {"milad/lib/libmilad.so", "milad/_milad_cffi.py"} <= found | {"milad/_milad_cffi.py"}
    assert "milad/_milad_cffi.py" in found
    manuals = {f"milad/man/{p.name}" for p in (ROOT / "man").glob("milad*.[158]")}
    assert manuals <= found
    assert not [n for n in found if n.startswith(("pycparser/", "native/", "tests/")) or n.endswith(".h") and "milad" in n]
    assert zipapp.stat().st_size < 5_000_000


def test_the_wheel_serves_every_python(zipapp: Path) -> None:
    with zipfile.ZipFile(zipapp) as z:
        tags = z.read(f"site-packages/milad-{milad.__version__}.dist-info/WHEEL").decode()
        wants = z.read(f"site-packages/milad-{milad.__version__}.dist-info/METADATA").decode()
    assert re.search(r"^Tag: py3-none-\w+$", tags, re.M)
    needed = [n for n in re.findall(r"^Requires-Dist: (.*)$", wants, re.M) if "extra ==" not in n]
    assert sorted(re.match(r"\w+", n)[0] for n in needed) == ["cffi", "tomli"]


def test_runs(zipapp: Path, tmp_path: Path) -> None:
    """By its shebang's Python, unpacked where SHIV_ROOT says, from another folder and without HOME."""
    environment = {"PATH": os.environ["PATH"], "SHIV_ROOT": str(tmp_path / "unpacked")}
    done = subprocess.run([sys.executable, zipapp, "--version"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and milad.__version__ in done.stdout
    (unpacked,) = (tmp_path / "unpacked").glob("*/site-packages")
    script = ("from milad import capi; import json; print(json.dumps([capi.library_path(), capi.version()]))")
    done = subprocess.run([sys.executable, "-S", "-c", script], cwd=tmp_path, capture_output=True, text=True,
                          env={**environment, "PYTHONPATH": str(unpacked)})
    path, version = json.loads(done.stdout or "[0, 0]")
    assert path == str(unpacked / "milad" / "lib" / "libmilad.so") and version == milad.__version__, done.stderr


def test_another_python_gets_one_line(zipapp: Path, tmp_path: Path) -> None:
    """The check itself, as it would run there: under a version that is not the one of the file, before anything is unpacked."""
    with zipfile.ZipFile(zipapp) as z:
        main = z.read("__main__.py").decode()
    here = "%d.%d" % sys.version_info[:2]
    assert re.search(r"!= \(\d, \d+\)", main)
    other = re.sub(r"!= \(\d, \d+\)", "!= (3, 99)", main)
    done = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("milad: this file needs Python") and done.stderr.endswith(f"under {here}\n")


def test_a_home_that_is_not_there(zipapp: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run([sys.executable, zipapp, "--version"], capture_output=True, text=True,
                          env={"PATH": os.environ["PATH"], "HOME": str(tmp_path / "file" / "home")})
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("milad: can't unpack: ") and "SHIV_ROOT" in done.stderr
