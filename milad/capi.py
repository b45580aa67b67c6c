"""libmilad through cffi: the Model and Context of engine/base on the real core. The only module that knows cffi.

The library is $MILAD_LIBRARY or lib/libmilad.so beside this file; _milad_cffi.py is generated from native/include/milad.h by
native/make_cffi.py, in a wheel beforehand, in a checkout on demand. `_lib` stays in a global: a dropped library is unmapped
under its functions. cffi releases the GIL in every call. Per-step data is packed with struct, whose layouts are
compared with the library's at load: one call per struct, where one cffi store per field would cost more than a token may.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
import weakref
import zlib
from array import array
from pathlib import Path
from typing import Any, Callable, Union

from . import __version__
from .engine.base import Batch, Interrupted, ModelInfo, Output, SamplerArgs
from .errors import EngineFault, ModelError, UsageError

OK, E_ARGUMENT, E_IO, E_FORMAT, E_UNSUPPORTED, E_MEMORY, E_INTERRUPTED, E_INTERNAL = range(0, -8, -1)
TOKEN_CONTROL, TOKEN_USER_DEFINED, TOKEN_EOG = 4, 8, 64
KV_TYPES = {"f16": 0, "q8_0": 1, "f32": 2, "bf16": 3}
PROBES = {"bandwidth": 0, "int8": 1, "bf16": 2, "f32": 3}

_SEQUENCE = struct.Struct("@Pii")             # milad_sequence
_SAMPLER = struct.Struct("@fifffffiQPiiPPiiP")  # milad_sampler
_OUTPUT = struct.Struct("@iifi20i20f")        # milad_output
_OUTPUT_HEAD = struct.Struct("@iif")
_STRUCTS = ("model_params", "model_info", "context_params", "context_stat", "sequence", "row", "sampler", "output", "batch")

_ffi: Any = None
_lib: Any = None
_lock = threading.Lock()


def library_path() -> str:
    return os.environ.get("MILAD_LIBRARY") or str(Path(__file__).resolve().parent / "lib" / "libmilad.so")


def _binding() -> Any:
    """The generated module's ffi; in a checkout it is generated when it is missing or older than the header."""
    here = Path(__file__).resolve().parent
    native = here.parent / "native"
    made, header = here / "_milad_cffi.py", native / "include" / "milad.h"
    if header.is_file() and not (made.is_file() and made.stat().st_mtime >= header.stat().st_mtime):
        sys.path.insert(0, str(native))
        try:
            import make_cffi
            make_cffi.write(made)
        except (ImportError, OSError) as e:
            raise UsageError(f"{made} is missing or older than {header.name} and can't be generated here: {e}") from e
        finally:
            sys.path.remove(str(native))
    try:
        from ._milad_cffi import ffi
    except ImportError as e:
        raise UsageError(f"the core's binding can't be imported: {e}") from e
    return ffi


def _check(ffi: Any, lib: Any, path: str) -> None:
    """Refuses a library whose structs are not this module's."""
    packed = {"sequence": _SEQUENCE, "sampler": _SAMPLER, "output": _OUTPUT}
    for which, name in enumerate(_STRUCTS):
        sizes = {ffi.sizeof(f"milad_{name}"), lib.milad_struct_size(which)}
        if name in packed:
            sizes.add(packed[name].size)
        if len(sizes) > 1:
            raise UsageError(f"{path} does not fit this milad {__version__}: it is another build of the core "
                             f"(milad_{name} has {lib.milad_struct_size(which)} bytes, not {ffi.sizeof('milad_' + name)})")


def library() -> Any:
    """The loaded library; UsageError, one line, when there is none or it is another build's."""
    global _ffi, _lib
    with _lock:
        if _lib is None:
            ffi, path = _binding(), library_path()
            try:
                lib = ffi.dlopen(path)
                lib.milad_struct_size
            except (OSError, AttributeError) as e:
                hint = "" if os.path.exists(path) else ": it is missing (build native/, or set MILAD_LIBRARY)"
                raise UsageError(f"can't load the core {path}{hint or ': ' + str(e)}") from e
            _check(ffi, lib, path)
            _ffi, _lib = ffi, lib
    return _lib


def _build() -> str:
    """A mark of this very library: another build may lay blocks out or round otherwise."""
    with open(library_path(), "rb") as f:
        return f"{__version__}-{zlib.crc32(f.read()):08x}"


def _last_error() -> str:
    return _string(_lib.milad_last_error())


def _text(call: Callable[[Any, int], int]) -> str:
    """Text of a function that returns the bytes it needs; raises ValueError with the core's words."""
    n = call(_ffi.NULL, 0)
    if n < 0:
        raise ValueError(_last_error())
    buf = _ffi.new("char[]", n + 1)
    call(buf, n + 1)
    return _ffi.buffer(buf)[:n].decode("utf-8")


def _string(pointer: Any) -> str:
    return _ffi.string(pointer).decode("utf-8", "replace")


def version() -> str:
    """The library's version."""
    return _string(library().milad_version())


def devices() -> dict[str, Any]:
    """What the core found: isa, cores, threads, devices."""
    lib = library()
    return json.loads(_text(lib.milad_devices))


def probe(kind: str, n_threads: int = 0) -> float:
    """Measures a limit of this machine for about 0.2 s: bandwidth (bytes/s), int8, bf16, f32 (operations/s)."""
    lib = library()
    out = _ffi.new("double *")
    if lib.milad_probe(PROBES[kind], n_threads, out) < 0:
        raise ValueError(_last_error())
    return out[0]


def drain_log() -> list[tuple[str, str]]:
    """The core's waiting log lines: (level D I W E, text). Empty when the library is not loaded."""
    if _lib is None:
        return []
    buf = _ffi.new("char[]", 1 << 16)
    n = _lib.milad_log_drain(buf, len(buf))
    lines = _ffi.buffer(buf)[:n].decode("utf-8", "replace").splitlines()
    return [(line[:1], line[2:]) for line in lines]


def to_utf8(text: str) -> bytes:
    """UTF-8 of any str: surrogate pairs joined, lone surrogates as U+FFFD."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode("utf-8")


class Model:
    """engine.base.Model on a model file. ModelError says what is wrong with the file, in one line.

    progress is called with 0..1 about ten times a second while the file loads, from a thread of its own."""

    def __init__(self, path: Union[str, os.PathLike[str]], *, vocab_only: bool = False, n_threads: int = 0,
                 mlock: bool = False, repack: bool = True, progress: Callable[[float], None] | None = None) -> None:
        lib = library()
        self.path = os.fspath(path)
        params = _ffi.new("milad_model_params *")
        params.size = _ffi.sizeof("milad_model_params")
        params.flags = vocab_only * 1 | mlock * 2 | (not repack) * 4
        params.n_threads = n_threads
        share = _ffi.new("float *")
        params.progress = share
        out = _ffi.new("milad_model **")
        if "\0" in self.path:
            raise ModelError("the model's path holds a NUL", E_ARGUMENT)
        with _Watch(share, progress):
            status = lib.milad_model_open(os.fsencode(self.path), params, out)
            message = _last_error() if status < 0 else ""
        if status < 0:
            raise ModelError(message, status)
        self._handle = out[0]
        self._contexts: weakref.WeakSet[Context] = weakref.WeakSet()
        self.info = self._read_info()
        self._bytes: list[bytes | None] = [None] * self.info.n_vocab
        self._attributes: list[int] | None = None
        self._specials: dict[str, int] | None = None
        self._eog: frozenset[int] | None = None

    def _read_info(self) -> ModelInfo:
        info = _ffi.new("milad_model_info *")
        info.size = _ffi.sizeof("milad_model_info")
        if _lib.milad_model_info_get(self._handle, info) < 0:
            raise ModelError(_last_error(), E_INTERNAL)
        values = {name: getattr(info, name) for name in ModelInfo.__dataclass_fields__}
        for name in ("architecture", "quantisation"):
            values[name] = _string(values[name])
        for name in ("add_bos", "add_eos", "has_weights"):
            values[name] = bool(values[name])
        return ModelInfo(**values)

    def metadata(self, key: str | None = None) -> Any:
        """The value under key (None: absent), or all as a dict (long arrays as {"array": n})."""
        name = _ffi.NULL if key is None else to_utf8(key)
        handle = self._open()
        try:
            text = _text(lambda buf, n: _lib.milad_model_metadata(handle, name, buf, n))
        except ValueError:
            return None
        return json.loads(text)

    def tokenize(self, text: Union[str, bytes], *, add_bos: bool = False, parse_special: bool = False) -> list[int]:
        data = to_utf8(text) if isinstance(text, str) else bytes(text)
        flags, room = add_bos * 1 | parse_special * 2, len(data) + 4
        handle = self._open()
        while True:
            tokens = _ffi.new("int32_t[]", room)
            n = _lib.milad_tokenize(handle, data, len(data), flags, tokens, room)
            if n < 0:
                raise EngineFault(_last_error())
            if n <= room:
                return _ffi.unpack(tokens, n) if n else []
            room = n

    def token_bytes(self, token: int) -> bytes:
        found = self._bytes[token] if 0 <= token < len(self._bytes) else None
        if found is None:
            found = self._token(token)[0]
            self._bytes[token] = found
        return found

    def _token(self, token: int) -> tuple[bytes, int]:
        attributes = _ffi.new("uint32_t *")
        room = 64
        handle = self._open()
        while True:
            buf = _ffi.new("char[]", room)
            n = _lib.milad_token_bytes(handle, token, buf, room, attributes)
            if n < 0:
                raise ValueError(_last_error())
            if n <= room:
                return _ffi.buffer(buf)[:n], attributes[0]
            room = n

    def _scan(self) -> list[int]:
        """Every token's attributes, read once; specials and eog with them."""
        if self._attributes is None:
            attributes, specials, eog = [0] * self.info.n_vocab, {}, []
            for token in range(self.info.n_vocab):
                data, attributes[token] = self._token(token)
                self._bytes[token] = data
                if attributes[token] & (TOKEN_CONTROL | TOKEN_USER_DEFINED):
                    specials.setdefault(data.decode("utf-8", "replace"), token)
                if attributes[token] & TOKEN_EOG:
                    eog.append(token)
            self._specials, self._eog, self._attributes = specials, frozenset(eog), attributes
        return self._attributes

    def is_control(self, token: int) -> bool:
        return bool(self._scan()[token] & TOKEN_CONTROL)

    @property
    def eog(self) -> frozenset[int]:
        self._scan()
        assert self._eog is not None
        return self._eog

    @property
    def specials(self) -> dict[str, int]:
        self._scan()
        assert self._specials is not None
        return self._specials

    def context(self, *, n_blocks: int, n_threads: int = 0, max_rows: int = 512, kv_type: str = "f16") -> "Context":
        context = Context(self, self._open(), n_blocks, n_threads, max_rows, kv_type)
        self._contexts.add(context)
        return context

    def _open(self) -> Any:
        if self._handle is None:
            raise EngineFault("the model is closed")
        return self._handle

    def close(self) -> None:
        """Closes its contexts too. No call may be running."""
        if self._handle is None:
            return
        for context in list(self._contexts):
            context.close()
        handle, self._handle = self._handle, None
        _lib.milad_model_close(handle)


class _Watch:
    """Calls progress(share) while its body runs."""

    def __init__(self, share: Any, progress: Callable[[float], None] | None) -> None:
        self._share, self._progress, self._end = share, progress, threading.Event()
        self._thread = threading.Thread(target=self._run, name="milad-load", daemon=True) if progress else None

    def _run(self) -> None:
        assert self._progress is not None
        while not self._end.wait(0.1):
            self._progress(self._share[0])
        self._progress(self._share[0])

    def __enter__(self) -> None:
        if self._thread:
            self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        if self._thread:
            self._thread.join()


class Context:
    """engine.base.Context on the core. One thread at a time, but for interrupt()."""

    def __init__(self, model: Model, handle: Any, n_blocks: int, n_threads: int, max_rows: int, kv_type: str) -> None:
        params = _ffi.new("milad_context_params *")
        params.size = _ffi.sizeof("milad_context_params")
        try:
            params.n_blocks, params.n_threads, params.max_rows = n_blocks, n_threads, max_rows
            params.kv_type = KV_TYPES[kv_type]
        except (KeyError, OverflowError) as e:
            raise UsageError(f"a context of {n_blocks} {kv_type} blocks and {max_rows} rows is not possible") from e
        out = _ffi.new("milad_context **")
        if _lib.milad_context_open(handle, params, out) < 0:
            raise UsageError(f"can't open a context: {_last_error()}")
        self._handle = out[0]
        self._model = model  # a model outlives its contexts
        self._n_vocab = model.info.n_vocab
        self._guard = threading.Lock()  # interrupt() against close()
        stat = self.stat()
        self.n_blocks: int = stat["n_blocks"]
        self.max_rows: int = stat["max_rows"]
        self.block_bytes: int = stat["kv_block_bytes"]
        self.layout = f"{stat['isa']}-{_build()}"
        self._batch = _ffi.new("milad_batch *")
        self._batch.size = _ffi.sizeof("milad_batch")
        self._room = (0, 0)  # sequences and outputs that the buffers below hold
        self._grow(1, 1)

    def step(self, batch: Batch, logits: array | None = None) -> list[Output]:
        """Outputs in the samplers' order. logits: array('f') of outputs x n_vocab that gets the raw logits.
        Raises Interrupted, EngineFault, ValueError for a batch that is not well formed."""
        n_outputs, tables, rows = len(batch.samplers), batch.tables, batch.rows
        if len(rows) % 4 or rows.typecode != "i":
            raise ValueError("rows must be an array('i') of quadruples")
        if logits is not None and (logits.typecode != "f" or len(logits) < n_outputs * self._n_vocab):
            raise ValueError("logits must be an array('f') of outputs x n_vocab")
        handle = self._open()
        self._grow(len(tables), n_outputs)
        for i, table in enumerate(tables):
            if table.typecode != "i":
                raise ValueError("a block table must be an array('i')")
            at, n = table.buffer_info()
            _SEQUENCE.pack_into(self._sequences, i * _SEQUENCE.size, at, n, 0)
        kept = [self._pack_sampler(i, s) for i, s in enumerate(batch.samplers)]
        b = self._batch
        b.n_rows, b.n_sequences, b.n_outputs = len(rows) // 4, len(tables), n_outputs
        b.rows = _ffi.cast("milad_row *", rows.buffer_info()[0])
        b.logits = _ffi.NULL if logits is None else _ffi.cast("float *", logits.buffer_info()[0])
        status = _lib.milad_step(handle, b)
        del kept
        if status < 0:
            if status == E_INTERRUPTED:
                raise Interrupted
            raise EngineFault(_last_error())
        return [self._unpack_output(i, s.n_top) for i, s in enumerate(batch.samplers)]

    def _grow(self, n_sequences: int, n_outputs: int) -> None:
        """Room for the structs of a batch, which stay where they are until they must grow."""
        if n_sequences <= self._room[0] and n_outputs <= self._room[1]:
            return
        self._room = (max(2 * n_sequences, 16), max(2 * n_outputs, 16))
        self._sequences = bytearray(self._room[0] * _SEQUENCE.size)
        self._samplers = bytearray(self._room[1] * _SAMPLER.size)
        self._outputs = bytearray(self._room[1] * _OUTPUT.size)
        self._views = (_ffi.from_buffer("milad_sequence[]", self._sequences),
                       _ffi.from_buffer("milad_sampler[]", self._samplers),
                       _ffi.from_buffer("milad_output[]", self._outputs))
        self._batch.sequences, self._batch.samplers, self._batch.outputs = self._views

    def _pack_sampler(self, i: int, s: SamplerArgs) -> Any:
        """Writes sampler i; returns what must live until the step is done."""
        history = ids = bias = mask = 0
        n_history = n_bias = 0
        view = None
        if s.history is not None:
            if s.history.typecode != "i":
                raise ValueError("a history must be an array('i')")
            history, n_history = s.history.buffer_info()
        if s.bias_ids is not None and s.bias is not None:
            if len(s.bias_ids) != len(s.bias) or s.bias_ids.typecode != "i" or s.bias.typecode != "f":
                raise ValueError("bias_ids must be an array('i') and bias an array('f') of one length")
            ids, n_bias = s.bias_ids.buffer_info()
            bias = s.bias.buffer_info()[0]
        if s.mask is not None:
            if len(s.mask) != (self._n_vocab + 31) // 32 * 4:
                raise ValueError(f"a mask has {len(s.mask)} bytes, not {(self._n_vocab + 31) // 32 * 4}")
            view = _ffi.from_buffer("uint32_t[]", s.mask)
            mask = int(_ffi.cast("uintptr_t", view))
        try:
            _SAMPLER.pack_into(self._samplers, i * _SAMPLER.size, s.temperature, s.top_k, s.top_p, s.min_p, s.repeat_penalty,
                               s.presence_penalty, s.frequency_penalty, s.n_top, s.seed & 0xFFFFFFFFFFFFFFFF, history,
                               n_history, s.n_prompt, ids, bias, n_bias, s.forced, mask)
        except (struct.error, OverflowError) as e:
            raise ValueError(f"a sampler's value is out of range: {e}") from e
        return view

    def _unpack_output(self, i: int, n_top: int) -> Output:
        at = i * _OUTPUT.size
        if n_top <= 0:
            token, _, logprob = _OUTPUT_HEAD.unpack_from(self._outputs, at)
            return Output(token, logprob)
        values = _OUTPUT.unpack_from(self._outputs, at)
        n = values[1]
        return Output(values[0], values[2], tuple(zip(values[4:4 + n], values[24:24 + n])))

    def kv_copy(self, src: int, dst: int, n_tokens: int) -> None:
        self._done(_lib.milad_kv_copy(self._open(), src, dst, n_tokens))

    def kv_read(self, block: int) -> bytes:
        buf = _ffi.new("char[]", self.block_bytes)
        self._done(_lib.milad_kv_read(self._open(), block, buf, self.block_bytes))
        return _ffi.buffer(buf)[:]

    def kv_write(self, block: int, data: bytes) -> None:
        self._done(_lib.milad_kv_write(self._open(), block, _ffi.from_buffer(data), len(data)))

    @staticmethod
    def _done(status: int) -> None:
        if status < 0:
            raise EngineFault(_last_error())

    def interrupt(self) -> None:
        with self._guard:
            if self._handle is not None:
                _lib.milad_interrupt(self._handle)

    def stat(self) -> dict[str, Any]:
        out = _ffi.new("milad_context_stat *")
        out.size = _ffi.sizeof("milad_context_stat")
        self._done(_lib.milad_context_stat_get(self._open(), out))
        names = ("n_threads", "n_blocks", "max_rows", "kv_bytes", "kv_block_bytes", "scratch_bytes", "n_steps", "n_rows")
        return {name: getattr(out, name) for name in names} | {"isa": _string(out.isa)}

    def begin(self, *, tools: bool, path: str, last: str) -> None:
        """The real core plays no script."""

    def _open(self) -> Any:
        if self._handle is None:
            raise EngineFault("the context is closed")
        return self._handle

    def close(self) -> None:
        with self._guard:
            handle, self._handle = self._handle, None
            if handle is not None:
                _lib.milad_context_close(handle)
