"""`milad models [list|show|rm]`: what lies in the models folder, what it is, and removing it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from .. import catalogue, loader
from ..errors import UsageError
from . import flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("list", "show", "rm"), default="list", help="what to do (default: list)")
    parser.add_argument("name", nargs="?", help="the model; show also takes a file")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("-c", "--config", metavar="FILE", help="the milad.conf to read")
    flags.add(parser, ("models_dir", "ctx", "kv_type"))


def run(parsed: argparse.Namespace) -> int:
    value = {n: v.value for n, v in flags.effective(parsed).items()}
    folder = loader.models_folder(value)
    if parsed.action == "list":
        return _list(folder, parsed.json)
    if not parsed.name:
        raise UsageError(f"milad models {parsed.action} NAME: which one?", 2)
    return _show(parsed, folder, value) if parsed.action == "show" else _rm(parsed.name, folder)


def _list(folder: Path, as_json: bool) -> int:
    have = catalogue.installed(folder)
    if as_json:
        print(json.dumps([{"name": f.name, "path": str(f.path), "bytes": f.n_bytes} for f in have]))
        return 0
    width = max((len(f.name) for f in have), default=0)
    for found in have:
        print(f"{found.name:<{width}}  {catalogue.size_text(found.n_bytes):>8}  {found.path}")
    if not have:
        print(f"no models in {folder}", file=sys.stderr)
    for entry in catalogue.CATALOGUE:
        if entry.name not in {f.name for f in have}:
            print(f"`milad pull {entry.name}` fetches {entry.about} ({entry.n_bytes / 1e6:.0f} MB, {entry.licence})",
                  file=sys.stderr)
    return 0


def _show(parsed: argparse.Namespace, folder: Path, value: dict[str, Any]) -> int:
    from .. import capi, families, sizing
    name, path = catalogue.resolve(parsed.name, folder)
    model = capi.Model(str(path), repack=False)
    try:
        info = model.info
        template = model.metadata("tokenizer.chat_template")
        family = families.choose(template if isinstance(template, str) else None, frozenset(model.specials), "").name
        n_ctx = value["ctx"] or info.n_ctx_train or 4096
        kv_bytes = n_ctx * sizing.kv_token_bytes(info.n_layer * info.n_head_kv, info.head_dim, value["kv_type"])
        found: dict[str, Any] = {
            "name": name, "path": str(path), "architecture": info.architecture, "quantisation": info.quantisation,
            "parameters": info.n_params, "layers": info.n_layer, "vocabulary": info.n_vocab, "context": info.n_ctx_train,
            "family": family, "weights_bytes": info.weight_bytes, "file_bytes": info.file_bytes,
            "kv_bytes": {"context": n_ctx, "kv_type": value["kv_type"], "bytes": kv_bytes},
            "licence": str(model.metadata("general.license") or "")}
    finally:
        model.close()
    if parsed.json:
        print(json.dumps(found))
        return 0
    size = catalogue.size_text
    lines = [("name", name), ("file", str(path)), ("architecture", f"{info.architecture}, {info.n_layer} layers, "
             f"{info.n_params / 1e6:,.0f} M parameters"), ("weights", f"{info.quantisation}, {size(info.weight_bytes)}"),
             ("context", f"{info.n_ctx_train:,} tokens"), ("family", family), ("licence", found["licence"] or "not said"),
             ("memory", f"{size(info.weight_bytes + kv_bytes)}: weights, and {size(kv_bytes)} for one request of {n_ctx:,} tokens "
                        f"({value['kv_type']})")]
    from ..log import escape
    print("\n".join(f"{k:<13} {escape(v)}" for k, v in lines))
    return 0


def _rm(name: str, folder: Path) -> int:
    for found in catalogue.installed(folder):      # by name out of the folder's own list: no path can be given
        if name == found.name:
            for path in catalogue.files_of(found):
                try:
                    path.unlink()
                except OSError as e:
                    raise UsageError(f"{path}: {e.strerror}") from e
                print(f"milad: removed {path}", file=sys.stderr)
            return 0
    raise UsageError(f"there is no model {name[:80]!r} in {folder}")
