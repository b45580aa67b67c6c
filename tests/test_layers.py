"""Who may import whom (the ranks of the design) and which rooms stay pure, checked on the source itself."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "milad"

RANKS = {
    "errors": 0, "conversation": 0, "events": 0, "options": 0, "log": 0, "textstream": 0, "sizing": 0, "engine.base": 0, "families.base": 0,
    "http.wire": 1, "http.sse": 1, "http.body": 1, "http.guard": 1, "http.base": 1, "protocols": 1, "families": 1, "engine": 1, "capi": 1, "store": 1,
    "grammar": 1, "masks": 0, "scripted": 1, "catalogue": 1, "machine": 1, "progress": 1, "_milad_cffi": 0,
    "config": 2, "keys": 2, "metrics": 2, "download": 1, "hub": 2, "service": 2, "access": 2, "http.tls": 2,
    "engine.loop": 2, "engine.disk": 1, "mailbox": 2,
    "output": 3, "turn": 3,
    "app": 4, "http.server": 4, "http.listen": 4, "loader": 4,
    "gate": 5, "models": 5, "daemon": 6, "agents": 4, "doctor": 5,
    "cli": 7, "__main__": 8,
}
# Whole packages whose modules are one room: they may import each other.
ROOMS = ("protocols", "families", "agents", "cli", "engine", "http", "app")
IMPURE = {"log", "download", "capi", "store", "scripted", "catalogue", "grammar", "machine", "engine.disk", "config", "_milad_cffi"}
FORBIDDEN = {"asyncio", "threading", "socket", "time", "os", "random", "cffi", "subprocess", "secrets", "uuid"}
# Names that need neither a clock nor a system: allowed in a pure room.


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        yield name.removesuffix("__init__").rstrip("."), path


def rank(name: str) -> int:
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        key = ".".join(parts[:n])
        if key in RANKS:
            return RANKS[key]
        if n == 1 and any(key == k.split(".")[0] for k in RANKS):
            room = [r for k, r in RANKS.items() if k.startswith(key + ".")]
            return max(room)
    raise AssertionError(f"milad.{name} has no rank: give it one in RANKS and in its room")


def imports(name: str, path: Path):
    """(milad module or None, outside top-level module or None, is it at module level)."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    tree = ast.parse(path.read_text())
    typing_only = {id(n) for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
                   for n in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                yield (".".join(alias.name.split(".")[1:]) if top == "milad" else None), top
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[:len(package) - node.level + 1]
                where = base + (node.module.split(".") if node.module else [])
                for alias in node.names:
                    full = ".".join(where + [alias.name])
                    yield (full if full in NAMES else ".".join(where)), None
            else:
                top = (node.module or "").split(".")[0]
                yield (".".join((node.module or "").split(".")[1:]) if top == "milad" else None), top


NAMES = {name for name, _ in modules()}
ALL = [(name, path) for name, path in modules() if name]


@pytest.mark.parametrize("name,path", ALL, ids=[n for n, _ in ALL])
def test_ranks(name, path):
    mine = rank(name)
    room = name.split(".")[0]
    for target, _ in imports(name, path):
        if not target or target == name:
            continue
        if target.split(".")[0] == room and room in ROOMS:
            assert rank(target) <= mine, f"milad.{name} imports milad.{target}, which is above it"
        elif not (rank(target) == mine == 0 or {name, target} == {"turn", "output"}):
            assert rank(target) < mine, f"milad.{name} (rank {mine}) imports milad.{target} (rank {rank(target)})"


@pytest.mark.parametrize("name,path", ALL, ids=[n for n, _ in ALL])
def test_pure_rooms(name, path):
    if rank(name) > 1 or name in IMPURE or name == "options":
        return
    outside = {top for _, top in imports(name, path) if top}
    assert not outside & FORBIDDEN, f"milad.{name} is pure and must not import {sorted(outside & FORBIDDEN)}"


def test_the_walk_sees_a_breach(tmp_path):
    """The checker itself: it must see a relative import upwards and a forbidden module."""
    bad = tmp_path / "bad.py"
    bad.write_text("import time\nfrom .turn import Runner\n")
    found = list(imports("errors", bad))
    assert ("turn", None) in found and (None, "time") in found


def test_only_the_declared_dependencies_at_run_time():
    """The stdlib and cffi; tomli below 3.11; llguidance in grammar alone."""
    import sys
    allowed = set(sys.stdlib_module_names) | {"milad", "_cffi_backend", "cffi"}
    for name, path in modules():
        for _, top in imports(name, path):
            if top and top not in allowed:
                assert (name, top) in {("config", "tomli"), ("config", "tomllib"), ("grammar", "llguidance")} or \
                    (name.startswith("grammar") and top == "llguidance") or \
                    (name, top) in {("http.body", "compression"), ("capi", "make_cffi")}, f"milad.{name} imports {top}"
