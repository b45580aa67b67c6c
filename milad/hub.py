"""Which files a model name means, and fetching them into the models folder: `hf:ORG/REPO[:QUANT or FILE]` of a hub that speaks
Hugging Face's protocol (HF_ENDPOINT, HF_TOKEN), or a URL. Names from outside never become paths: only a checked base name does.
"""

from __future__ import annotations

import json
import os
import re
import urllib.error
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping
from urllib.parse import quote, unquote, urlsplit

from . import catalogue, download
from .errors import UsageError

ENDPOINT = "https://huggingface.co"
PREFERRED = ("q4_k_m", "q4_0", "q8_0")          # where nothing is said and the repository has several
MAX_LISTING = 32 << 20
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,200}\.gguf")
_REPO = re.compile(r"hf:([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?::([^:]+))?")


@dataclass(frozen=True)
class File:
    url: str
    name: str                    # in the models folder
    size: int = 0
    sha256: str = ""


def base_name(path: str) -> str:
    """A file's name as it may stand in the models folder."""
    name = unquote(path).rpartition("/")[2]
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name[:80]!r} is not a GGUF file's name: letters, digits and . _ + = -, ending in .gguf")
    return name


def parts(name: str) -> list[str]:
    """The names of all parts of a split file; of another, its own."""
    found = SPLIT.fullmatch(name)
    if not found:
        return [name]
    n = int(found[3])
    if not 1 <= int(found[2]) <= n <= 999:
        raise UsageError(f"{name}: no such part")
    return [f"{found[1]}-{i:05}-of-{n:05}.gguf" for i in range(1, n + 1)]


def from_url(url: str) -> list[File]:
    """The file of a URL; where it is one part of a split file, all of them."""
    download.check_url(url)
    split = urlsplit(url)
    folder, _, last = split.path.rpartition("/")
    return [File(split._replace(path=f"{folder}/{quote(name)}").geturl() if name != unquote(last) else url, name)
            for name in parts(base_name(split.path))]


def from_repository(wanted: str, env: Mapping[str, str] | None = None) -> tuple[list[File], dict[str, str]]:
    """The files that hf:ORG/REPO[:QUANT or FILE] means, with sizes and hashes as the hub lists them, and the headers to send."""
    env = os.environ if env is None else env
    found = _REPO.fullmatch(wanted)
    if not found or ".." in wanted:
        raise UsageError(f"{wanted[:120]!r} is not hf:ORG/REPO, hf:ORG/REPO:QUANT or hf:ORG/REPO:FILE.gguf")
    repo, which = found[1], found[2] or ""
    endpoint = (env.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
    download.check_url(endpoint)
    headers = {"Authorization": f"Bearer {env['HF_TOKEN']}"} if env.get("HF_TOKEN") else {}
    listing = _listing(f"{endpoint}/api/models/{repo}/tree/main?recursive=true", headers, repo)
    chosen = choose({entry["path"]: entry for entry in listing}, which, repo)
    files = []
    for entry in chosen:
        lfs = entry.get("lfs") if isinstance(entry.get("lfs"), dict) else {}
        sha256 = str(lfs.get("oid", "")).removeprefix("sha256:").lower()
        size = lfs.get("size", entry.get("size", 0))
        files.append(File(f"{endpoint}/{repo}/resolve/main/{quote(entry['path'])}", base_name(entry["path"]),
                          size if isinstance(size, int) and size > 0 else 0,
                          sha256 if re.fullmatch(r"[0-9a-f]{64}", sha256) else ""))
    return files, headers


def _listing(url: str, headers: dict[str, str], repo: str) -> list[dict[str, Any]]:
    """Every GGUF file of the repository; the hub pages its answers by Link headers."""
    found: list[dict[str, Any]] = []
    for _ in range(50):
        try:
            response, _ = download.open_url(url, headers)
            with response:
                data = response.read(MAX_LISTING + 1)
                link = re.search(r'<([^>]+)>;\s*rel="next"', response.headers.get("Link", ""))
            entries = json.loads(data) if len(data) <= MAX_LISTING else None
        except urllib.error.HTTPError as e:
            raise UsageError(f"hf:{repo}: {e.code} {e.reason}{download._hint(e.code)}") from None
        except (OSError, ValueError) as e:
            raise UsageError(f"{download.shown(url)}: {getattr(e, 'reason', None) or e}") from None
        if not isinstance(entries, list):
            raise UsageError(f"{download.shown(url)}: not a list of files")
        found += [e for e in entries if isinstance(e, dict) and isinstance(e.get("path"), str) and e["path"].endswith(".gguf")]
        if not link or urlsplit(link[1])[:2] != urlsplit(url)[:2]:
            return found
        url = link[1]
    return found


def choose(entries: Mapping[str, dict[str, Any]], which: str, repo: str) -> list[dict[str, Any]]:
    """The entries of one model: a file by its path or name, a quantisation by its word in the name, or the only one there is;
    of a split file all parts."""
    models = sorted({parts_first(path) for path in entries} - {p for p in entries if "mmproj" in p.lower()})
    if not models:
        raise UsageError(f"hf:{repo} has no GGUF file; milad runs those only")
    if which.endswith(".gguf"):
        matches = [m for m in models if which in (m, m.rpartition("/")[2]) or parts_first(which) in (m, m.rpartition("/")[2])]
    elif which:
        matches = [m for m in models if which.lower() in _words(m)]
    else:
        matches = models if len(models) == 1 else next(
            ([m for m in models if q in _words(m)] for q in PREFERRED if any(q in _words(m) for m in models)), models)
    if len(matches) != 1:
        what = f"{len(matches)} files fit" if matches else f"no file fits {which[:60]!r}"
        raise UsageError(f"hf:{repo}: {what}; say hf:{repo}:FILE with one of " + ", ".join((matches or models)[:40]))
    folder, slash, name = matches[0].rpartition("/")
    wanted = [folder + slash + n for n in parts(name)]
    missing = [w for w in wanted if w not in entries]
    if missing:
        raise UsageError(f"hf:{repo} lacks {missing[0]}, a part of {matches[0]}")
    return [entries[w] for w in wanted]


def parts_first(path: str) -> str:
    """The path of the first part of a split file; of another, itself."""
    found = SPLIT.fullmatch(path)
    return f"{found[1]}-00001-of-{found[3]}.gguf" if found else path


def _words(path: str) -> set[str]:
    """The words of a file's name between - and ., in lower case: the quantisation is one."""
    return set(re.split(r"[-.]", path.rpartition("/")[2].lower()))


def pull(wanted: str, folder: Path, *, sha256: str = "", say: Callable[[str], None] = lambda line: None,
         progress: Callable[[str], download.Progress] = lambda name: lambda done, total: None) -> Path:
    """Fetches what hf:... or a URL means; the path of the (first) file. Files that are there and right are not fetched again."""
    files, headers = from_repository(wanted) if wanted.startswith("hf:") else (from_url(wanted), {})
    if sha256 and len(files) > 1:
        raise UsageError("--sha256 is for one file; this model has several")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"{folder}: {e.strerror}") from e
    for file in files:
        target = folder / file.name
        expected = sha256 or file.sha256
        if target.exists():
            if expected and catalogue.sha256(target) == expected.lower() or not expected and not file.size:
                say(f"{file.name} is here already")
                continue
            if expected or file.size != target.stat().st_size:
                raise UsageError(f"{target} is another file of that name; `milad models rm {catalogue.name_of(target)}` removes it")
            say(f"{file.name} is here already; its source gives no checksum")
            continue
        say(f"fetching {file.name}" + (f" ({catalogue.size_text(file.size)})" if file.size else ""))
        checked = download.fetch(file.url, target, size=file.size, sha256=expected, headers=headers, progress=progress(file.name))
        with open(target, "rb") as f:
            magic = f.read(4)
        if magic != b"GGUF":
            os.unlink(target)
            raise UsageError(f"{download.shown(file.url)}: that is not a GGUF file")
        if not checked:
            say(f"{file.name}: the source gives no SHA-256 to check it by; it is {catalogue.sha256(target)}")
    return folder / files[0].name
