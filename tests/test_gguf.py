"""Model files, good and hostile, through the whole core: the `gguf` package is the oracle of what a good file says; a bad one
is one line that names the file and what is wrong in it, whatever it claims to hold."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny as writer

from milad import capi
from milad.errors import ModelError

pytestmark = pytest.mark.usefixtures("library")

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def value(key: bytes, kind: int, payload: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + payload


def tensor(name: bytes, dims: list[int], kind: int = 0, offset: int = 0, n_dims: int | None = None) -> bytes:
    n = len(dims) if n_dims is None else n_dims
    return string(name) + struct.pack("<I", n) + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


def file(n_tensors: int = 0, n_values: int = 0, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_values) + body


ARCH = value(b"general.architecture", STRING, string(b"llama"))
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", r"not a GGUF file: it is empty"),
    "other": (b"PK\x03\x04" + bytes(60), r"not a GGUF file"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", r"Git LFS pointer"),
    "magic only": (b"GGUF", r"the file ends inside the header"),
    "version 0": (file(version=0), r"GGUF version 0"),
    "version 4": (file(version=4), r"GGUF version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), r"big-endian"),
    "2^63 values": (file(0, 1 << 63), r"counts 9223372036854775808 keys"),
    "2^63 tensors": (file(1 << 63, 0), r"counts 9223372036854775808 tensors"),
    "more values than bytes": (file(0, 5, ARCH), r"counts 5 keys"),
    "key of 2^64-1": (file(0, 1, struct.pack("<Q", 2**64 - 1) + bytes(20)), r"a key has length 18446744073709551615"),
    "no key": (file(0, 1, value(b"", U32, bytes(4))), r"a key has 0 bytes"),
    "unknown type": (file(0, 1, value(b"k", 13, bytes(8))), r"key 'k' has unknown type 13"),
    "string past the end": (file(0, 1, value(b"k", STRING, struct.pack("<Q", 99))), r"key 'k' has length 99"),
    "array of 2^61": (file(0, 1, value(b"k", ARRAY, struct.pack("<IQ", U64, 1 << 61))), r"key 'k' has 2305843009213693952 items"),
    "array past the end": (file(0, 1, value(b"k", ARRAY, struct.pack("<IQ", U32, 2) + bytes(4))), r"key 'k'"),
    "nested array": (file(0, 1, value(b"k", ARRAY, struct.pack("<IQIQ", ARRAY, 1, U32, 1) + bytes(4))), r"key 'k' is an array of arrays"),
    "bool of 2": (file(0, 1, value(b"k", BOOL, b"\2")), r"key 'k' is a bool of value 2"),
    "key twice": (file(0, 2, ARCH + ARCH), r"key 'general.architecture' occurs twice"),
    "no architecture": (file(), r"key 'general.architecture' is missing"),
    "architecture number": (file(0, 1, value(b"general.architecture", U32, bytes(4))), r"key 'general.architecture' is of type u32, not string"),
    "other architecture": (file(0, 1, value(b"general.architecture", STRING, string(b"bert\x1b[2J\n"))), r"architecture 'bert\\x1b\[2J\\x0a' is not supported"),
    "adapter": (file(0, 2, value(b"general.type", STRING, string(b"adapter")) + ARCH), r"'general.type' is 'adapter'"),
    "no layers": (file(0, 1, ARCH), r"key 'llama.block_count' is missing"),
    "5 dimensions": (file(1, 0, tensor(b"t", [1] * 5)), r"tensor 't' has 5 dimensions"),
    "0 dimensions": (file(1, 0, tensor(b"t", [], n_dims=0) + bytes(32)), r"tensor 't' has 0 dimensions"),
    "dimension 0": (file(1, 0, tensor(b"t", [0, 4])), r"tensor 't': dimension 0 of 0"),
    "product wraps": (file(1, 0, tensor(b"t", [1 << 32, 1 << 32])), r"tensor 't': dimension 1 of 4294967296 is impossible"),
    "product wraps to 0": (file(1, 0, tensor(b"t", [1 << 33, 1 << 31])), r"tensor 't': dimension 1"),
    "bytes wrap": (file(1, 0, tensor(b"t", [1 << 62])), r"tensor 't' is impossibly large"),
    "offset beyond": (file(1, 0, tensor(b"t", [4], 0, 1 << 40)), r"tensor 't': 16 bytes at offset 1099511627776 reach beyond the end"),
    "offset wraps": (file(1, 0, tensor(b"t", [4], 0, 2**64 - 32)), r"tensor 't': 16 bytes at offset 18446744073709551584"),
    "crooked offset": (file(1, 0, tensor(b"t", [4], 0, 4)), r"tensor 't': offset 4 is no multiple of the alignment 32"),
    "half a block": (file(1, 0, tensor(b"t", [48], 2)), r"tensor 't': rows of 48 values are no multiple of Q4_0's blocks of 32"),
    "tensor twice": (file(2, 0, tensor(b"t", [4]) + tensor(b"t", [4]) + bytes(64)), r"tensor 't' occurs twice"),
    "long name": (file(1, 0, tensor(b"t" * 300, [4])), r"a tensor's name has 300 bytes"),
    "alignment 0": (file(0, 1, value(b"general.alignment", U32, bytes(4))), r"key 'general.alignment' is 0"),
    "alignment 48": (file(0, 1, value(b"general.alignment", U32, struct.pack("<I", 48))), r"key 'general.alignment' is 48"),
    "alignment text": (file(0, 1, value(b"general.alignment", STRING, string(b"32"))), r"key 'general.alignment' is of type string"),
}


def refusal(path: Path) -> str:
    """The message that opening `path` raises, checked to be one line that begins with the file."""
    with pytest.raises(ModelError) as caught:
        capi.Model(path).close()
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and message.isprintable()
    assert caught.value.status in (capi.E_IO, capi.E_FORMAT, capi.E_UNSUPPORTED)
    return message


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str, tmp_path: Path) -> None:
    data, words = HOSTILE[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    assert re.search(words, refusal(path))


def test_hostile_files_cost_no_memory(tmp_path: Path, library: Path) -> None:
    """All of them in one process that may not grow by more than 48 MB."""
    for i, (data, _) in enumerate(HOSTILE.values()):
        (tmp_path / f"{i}.gguf").write_bytes(data)
    program = """if True:
        import pathlib, resource, sys
        from milad import capi
        from milad.errors import ModelError
        capi.library()
        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * resource.getpagesize() + (48 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
            try:
                capi.Model(path)
            except ModelError as e:
                assert e.status != capi.E_MEMORY, e
                print("refused")
    """
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60,
                          cwd=Path(capi.__file__).parent.parent, env={**os.environ, "MILAD_LIBRARY": str(library)})
    assert done.stdout.count("refused") == len(HOSTILE), done.stderr


def test_not_a_file(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "absent.gguf")
    assert "not a regular file" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(tmp_path / "pipe")


def test_cut_short_anywhere(tiny, tmp_path: Path) -> None:
    data = tiny(n_layer=1, n_embd=16, n_head=2, n_head_kv=1, n_ff=32).read_bytes()
    path = tmp_path / "cut.gguf"
    for n in [*range(0, 2000, 7), *range(2000, len(data) - 40, 499)]:
        path.write_bytes(data[:n])
        refusal(path)


@pytest.mark.parametrize("seed", range(3))
def test_damaged_bytes(seed: int, tiny, tmp_path: Path) -> None:
    """A refusal or a model, never more; what opens must tokenise."""
    data = tiny(n_layer=1, n_embd=16, n_head=2, n_head_kv=1, n_ff=32).read_bytes()
    random = np.random.default_rng(seed)
    path = tmp_path / "damaged.gguf"
    n_opened = 0
    for _ in range(400):
        copy = bytearray(data)
        for at in random.integers(0, 6000, random.integers(1, 5)):
            copy[at] = random.integers(0, 256)
        path.write_bytes(copy)
        try:
            model = capi.Model(path)
        except ModelError as e:
            assert "\n" not in str(e)
            continue
        n_opened += 1
        model.tokenize("hello <|im_end|> world \U0001f600\xe9", parse_special=True)
        model.metadata()
        model.close()
    assert n_opened > 0


BAD_OPTIONS: list[tuple[dict, str]] = [
    ({"extra": {"llama.attention.head_count_kv": 3}}, r"head_count_kv' is 3, which does not divide head_count 4"),
    ({"extra": {"llama.attention.head_count_kv": 0}}, r"head_count_kv' is 0"),
    ({"extra": {"llama.attention.head_count": 0}}, r"head_count' is 0"),
    ({"extra": {"llama.attention.head_count_kv": [2, 2]}}, r"head_count_kv' is of type array"),
    ({"extra": {"llama.block_count": 3}}, r"too few for 3 layers|blk.2"),
    ({"extra": {"llama.block_count": 2**31}}, r"block_count' is 2147483648"),
    ({"extra": {"llama.block_count": -1}}, r"block_count' is negative"),
    ({"extra": {"llama.block_count": 2.0}}, r"block_count' is of type f32"),
    ({"extra": {"llama.embedding_length": 32, "llama.rope.dimension_count": None}}, r"tensor 'token_embd.weight' has the shape 64 x 286 x 1 x 1, not 32 x 286"),
    ({"extra": {"llama.feed_forward_length": 32}}, r"tensor 'blk.0.ffn_gate.weight' has the shape 64 x 160"),
    ({"extra": {"llama.context_length": 0}}, r"context_length' is 0"),
    ({"extra": {"llama.attention.layer_norm_rms_epsilon": None}}, r"layer_norm_rms_epsilon' is missing"),
    ({"extra": {"llama.attention.layer_norm_rms_epsilon": math.nan}}, r"layer_norm_rms_epsilon' is not finite"),
    ({"extra": {"llama.rope.freq_base": math.inf}}, r"rope.freq_base' is not finite"),
    ({"extra": {"llama.rope.freq_base": -1.0}}, r"rope.freq_base' is -1"),
    ({"extra": {"llama.rope.dimension_count": 15}}, r"rope.dimension_count' is 15, an odd"),
    ({"extra": {"llama.rope.dimension_count": 18}}, r"rope.dimension_count' is 18"),
    ({"extra": {"llama.attention.value_length": 8}}, r"value_length' is 8, another than key_length 16"),
    ({"extra": {"llama.expert_count": 8}}, r"expert_count' is 8: mixtures of experts"),
    ({"extra": {"llama.rope.scaling.type": "longrope"}}, r"rope.scaling.type' is 'longrope': this RoPE scaling"),
    ({"extra": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1e-40}}, r"frequency that is not finite"),
    ({"tensors": {"blk.1.ffn_up.weight": None}}, r"tensor 'blk.1.ffn_up.weight' is missing|too few"),
    ({"tensors": {"output_norm.weight": None}, "bias": True}, r"tensor 'output_norm.weight' is missing"),
    ({"tensors": {"blk.0.attn_norm.weight": np.zeros(32, np.float32)}}, r"tensor 'blk.0.attn_norm.weight' has the shape 32 x 1"),
    ({"tensors": {"blk.0.attn_norm.weight": np.full(64, np.nan, np.float32)}}, r"tensor 'blk.0.attn_norm.weight' holds a value that is not"),
    ({"tensors": {"blk.0.ffn_norm.weight": np.zeros(64, np.int32)}}, r"tensor 'blk.0.ffn_norm.weight' is of type I32, which is not supported"),
    ({"tensors": {"blk.0.ffn_gate.bias": np.zeros(160, np.float32)}}, r"tensor 'blk.0.ffn_gate.bias' has no place"),
    ({"tensors": {"rope_freqs.weight": np.zeros(8, np.float32)}}, r"tensor 'rope_freqs.weight' holds 0"),
    ({"tensors": {"rope_freqs.weight": np.ones(9, np.float32)}}, r"tensor 'rope_freqs.weight' is not F32 of 8"),
    ({"arch": "qwen3", "tensors": {"blk.0.attn_k_norm.weight": None}, "bias": True}, r"tensor 'blk.0.attn_k_norm.weight' is missing"),
    ({"vocab_only": True}, r"vocabulary"),
    ({"arch": "gemma"}, r"architecture 'gemma' is not supported"),
]


@pytest.mark.parametrize("number", range(len(BAD_OPTIONS)))
def test_bad_models(number: int, tmp_path: Path) -> None:
    options, words = BAD_OPTIONS[number]
    path = tmp_path / "bad.gguf"
    writer.write(path, **options)
    assert re.search(words, refusal(path))


def test_unknown_scaling_is_not_guessed_and_known_ones_open(tiny) -> None:
    for rope in ("", "linear", "yarn", "llama3", "freqs", "none"):
        model = capi.Model(tiny(rope=rope))
        assert model.info.has_weights
        model.close()


def check_metadata(model: capi.Model, path: Path) -> None:
    """The core's JSON against what the gguf package reads."""
    fields = gguf.GGUFReader(path).fields
    want = {name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")}
    got = model.metadata()
    assert list(got) == list(want)
    for key, expected in want.items():
        found = model.metadata(key)
        if fields[key].types[-1] == gguf.GGUFValueType.FLOAT32:
            assert np.array_equal(np.float32(found), np.float32(expected)), key
        else:
            assert found == expected, key
        if isinstance(expected, list) and len(expected) > 64:
            assert got[key] == {"array": len(expected)}
        else:
            assert got[key] == found


def test_metadata_equals_the_packages(tiny) -> None:
    extra = {"test.u8": np.uint8(255), "test.i8": np.int8(-1), "test.u16": np.uint16(65535), "test.i16": np.int16(-2),
             "test.i32": np.int32(-(2**31)), "test.u64": np.uint64(2**64 - 1), "test.i64": np.int64(-(2**63)),
             "test.f64": np.float64(1e300), "test.bool": True, "test.text": 'a"\\\n\x01 \xe9 \U0001f600',
             "test.list": [1, 2, 3], "test.texts": ["", "\xe9"], "test.flags": [True, False], "test.floats": [0.5, 0.1]}
    path = tiny(extra=extra)
    model = capi.Model(path)
    check_metadata(model, path)
    assert model.metadata("absent") is None
    assert model.metadata("test.\ud800") is None
    model.close()


def test_metadata_of_the_default_model(default_model: Path) -> None:
    model = capi.Model(default_model, vocab_only=True)
    check_metadata(model, default_model)
    assert not model.info.has_weights and model.info.n_vocab == 49152
    model.close()


def test_metadata_that_is_not_unicode(tmp_path: Path) -> None:
    """Ill-formed UTF-8 and numbers that JSON lacks leave as U+FFFD and null."""
    path = tmp_path / "odd.gguf"
    writer.write(path, extra={"test.text": "@@@@", "test.number": math.nan})
    path.write_bytes(path.read_bytes().replace(b"@@@@", b"\xff\xed\xa0\x80"))
    model = capi.Model(path)
    assert model.metadata("test.text") == "\ufffd" * 4
    assert model.metadata("test.number") is None and json.loads(json.dumps(model.metadata()))["test.number"] is None
    model.close()


@pytest.mark.parametrize("options", [{}, {"arch": "qwen2", "tied": False}, {"arch": "qwen3", "head_dim": 32, "weight_type": "Q8_0"},
                                     {"weight_type": "Q4_1", "embd_type": "Q8_0", "n_head_kv": 1}])
def test_info_equals_the_packages(options: dict, tiny) -> None:
    path = tiny(**options)
    reader = gguf.GGUFReader(path)
    model = capi.Model(path)
    info = model.info
    arch = options.get("arch", "llama")
    assert info.architecture == arch
    assert info.n_params == sum(int(t.n_elements) for t in reader.tensors)
    assert info.file_bytes == path.stat().st_size
    assert (info.n_layer, info.n_embd, info.n_head, info.n_ff, info.n_ctx_train) == (2, 64, 4, 160, 512)
    assert info.head_dim == options.get("head_dim", 16) and info.n_head_kv == options.get("n_head_kv", 2)
    assert info.quantisation == options.get("weight_type", "F32")
    assert (info.bos, info.eos, info.unk, info.pad, info.add_bos) == (1, 2, 0, 2, False)
    matrices = sum(int(t.n_bytes) for t in reader.tensors if len(t.shape) == 2)
    embd = sum(int(t.n_bytes) for t in reader.tensors if t.name == "token_embd.weight") * (not options.get("tied", True))
    unpacked = capi.Model(path, repack=False)
    assert unpacked.info.weight_bytes == matrices - embd
    assert model.info.weight_bytes >= matrices - embd  # panels are padded to 16 rows
    unpacked.close()
    model.close()


def test_fingerprint_tells_models_apart(tiny, tmp_path: Path) -> None:
    """Equal for equal content under any name; different for other weights, shapes, types, scaling, vocabulary."""
    same, again = tmp_path / "a.gguf", tmp_path / "b.gguf"
    writer.write(same)
    writer.write(again, extra={"general.name": "renamed", "tokenizer.chat_template": "{{ x }}"})
    prints = set()
    for path in (same, again, tiny(seed=1), tiny(weight_type="F16"), tiny(rope="yarn"), tiny(rope_base=5000.0),
                 tiny(pre="smollm"), tiny(n_layer=1)):
        for repack in (True, False):
            model = capi.Model(path, repack=repack)
            prints.add(model.info.fingerprint)
            model.close()
    assert len(prints) == 7


def test_sliding_window_limits_the_context(tiny) -> None:
    capi.drain_log()
    model = capi.Model(tiny(extra={"llama.attention.sliding_window": 128}))
    assert model.info.n_ctx_train == 128
    assert any("sliding window" in text for _, text in capi.drain_log())
    model.close()


# Split models

def write_split(folder: Path, **options: object) -> list[Path]:
    writer.write(folder / "m.gguf", split=6, **options)
    return sorted(folder.glob("m-*.gguf"))


def test_a_split_model_is_the_whole_by_any_name(tiny, tmp_path: Path) -> None:
    parts = write_split(tmp_path, seed=3)
    whole = capi.Model(tiny(seed=3))
    assert len(parts) == 4
    for path in parts:
        model = capi.Model(path)
        assert model.info.n_params == whole.info.n_params and model.info.weight_bytes == whole.info.weight_bytes
        assert model.info.fingerprint == whole.info.fingerprint
        assert model.info.file_bytes == sum(p.stat().st_size for p in parts)
        assert model.metadata("split.count") == 4
        model.close()
        capi.Model(path, vocab_only=True).close()
    whole.close()


def test_split_models_that_lack_something(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    data = [p.read_bytes() for p in parts]

    def refused(path: Path) -> str:
        with pytest.raises(ModelError) as caught:
            capi.Model(path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    parts[2].unlink()
    assert "m-00003-of-00004.gguf: No such file" in refused(parts[0])
    parts[2].write_bytes(data[1])
    assert "m-00003-of-00004.gguf: key 'split.no' is not 2" in refused(parts[0])
    parts[2].write_bytes(data[2][:-4000])
    assert "m-00003-of-00004.gguf: tensor" in refused(parts[3])
    parts[2].write_bytes(b"")
    assert "m-00003-of-00004.gguf: not a GGUF file" in refused(parts[0])
    parts[2].write_bytes(data[2])
    (tmp_path / "renamed.gguf").write_bytes(data[0])
    assert "a part of 4, but its name does not end in" in refused(tmp_path / "renamed.gguf")
    (tmp_path / "m-00001-of-00005.gguf").write_bytes(data[0])
    assert "its name does not end in" in refused(tmp_path / "m-00001-of-00005.gguf")
    count = string(b"split.count") + struct.pack("<IH", 2, 4)
    assert data[0].count(count) == 1
    (tmp_path / "many.gguf").write_bytes(data[0].replace(count, count[:-2] + b"\xff\xff"))
    assert "'split.count' is 65535" in refused(tmp_path / "many.gguf")
    total = string(b"split.tensors.count") + struct.pack("<Ii", 5, 20)
    assert data[0].count(total) == 1
    parts[0].write_bytes(data[0].replace(total, total[:-4] + b"\x15\0\0\0"))
    assert "'split.tensors.count' is 21, but the parts have 20" in refused(parts[1])
    parts[0].write_bytes(data[0])
    capi.Model(parts[1]).close()
