"""Writes the binding's module from the header: cffi's out-of-line ABI mode, one Python file for every interpreter.

    python native/make_cffi.py OUT/_milad_cffi.py

The header is the only source: comments, preprocessor lines, the C++ guard and MILAD_API go, the rest is the cdef.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path

HEADER = Path(__file__).resolve().parent / "include" / "milad.h"


def declarations(header: str) -> str:
    text = re.sub(r"/\*.*?\*/", " ", header, flags=re.S)
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", text, flags=re.S)
    text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return re.sub(r"\bMILAD_API\b", "", text).replace("volatile ", "")


def write(out: Path) -> None:
    """Generates `out`, at once or not at all (another process may be importing it)."""
    from cffi import FFI

    ffi = FFI()
    ffi.cdef(declarations(HEADER.read_text(encoding="utf-8")))
    ffi.set_source(out.stem, None)
    scratch = out.with_name(f".{out.stem}.{os.getpid()}.py")
    with contextlib.redirect_stdout(io.StringIO()):  # cffi prints the scratch file's name
        ffi.emit_python_code(str(scratch))
    os.replace(scratch, out)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: make_cffi.py OUT.py")
    write(Path(sys.argv[1]))
