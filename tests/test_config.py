"""Where values come from: files, a .env beside them, the environment, flags; and notes about what does nothing."""

from __future__ import annotations

import pytest

from milad import config, options
from milad.cli import flags
from milad.errors import UsageError

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib  # type: ignore[no-redef]


def test_the_order_of_layers(tmp_path):
    conf = tmp_path / "milad.conf"
    conf.write_text('port = 1001\nctx = 512\nkeepalive = 2\ntop_k = 5\nmodel = "a.gguf"\n')
    (tmp_path / ".env").write_text('# Mila\'s\nexport MILA_PORT=1002\nMILA_CONTEXT_LENGTH="1024"\nMILA_DEFAULT_TOP_K=6\n')
    found = config.load({"top_k": "8"}, str(conf), {"MILA_PORT": "1003", "MILAD_PORT": "1004", "MILA_DEFAULT_TOP_K": "7"})
    assert {n: found[n].value for n in ("port", "ctx", "keepalive", "top_k", "model", "top_p")} == {
        "port": 1004, "ctx": 1024, "keepalive": 2.0, "top_k": 8, "model": ("a.gguf",), "top_p": None}
    assert found["ctx"].source == f"{tmp_path / '.env'}: MILA_CONTEXT_LENGTH" and found["keepalive"].source == str(conf)
    assert found["port"].source == "MILAD_PORT" and found["top_k"].source == "flag --top-k"


def test_every_name_of_milas_server_works():
    env = {"MILA_MODEL_PATH": "m.gguf", "MILA_CONTEXT_LENGTH": "2048", "MILA_DEFAULT_MAX_NEW_TOKENS": "99",
           "MILA_DEFAULT_TEMPERATURE": "0.1", "MILA_DEFAULT_TOP_K": "3", "MILA_DEFAULT_TOP_P": "0.5", "MILA_LOG_LEVEL": "DEBUG",
           "MILA_HOST": "::1", "MILA_PORT": "6452", "MILA_KEEPALIVE_INTERVAL": "7", "MILA_TOOL_CALLING_ENABLED": "true",
           "MILA_PROTOCOL": "openai", "MILA_MODEL_NAME": "mine", "MILA_TOKENIZER_PATH": "t.bin"}
    notes: list[str] = []
    found = config.load({}, env=env, notes=notes)
    got = {n: v.value for n, v in found.items() if v.source in env}
    assert got == {"model": ("m.gguf",), "ctx": 2048, "max_tokens": 99, "temperature": 0.1, "top_k": 3, "top_p": 0.5,
                   "log_level": "debug", "host": "::1", "port": 6452, "keepalive": 7.0, "tools": "on", "protocols": ("openai",),
                   "model_name": "mine"}
    assert len(notes) == 1 and "MILA_TOKENIZER_PATH" in notes[0]


def test_notes_on_variables_that_do_nothing():
    notes: list[str] = []
    config.load({}, env={"MILAD_PROT": "1", "MILA_HSOT": "x", "MILA_OTHER": "x", "MILAD_LIBRARY": "x", "PATH": "x"}, notes=notes)
    assert len(notes) == 2 and any("MILAD_PORT" in n for n in notes) and any("MILA_HOST" in n for n in notes)


def test_a_table_of_models(tmp_path):
    conf = tmp_path / "milad.conf"
    for text, wanted in (('model = "a.gguf"\n[models]\ncoder = "b.gguf"\n"x:1" = "c"\n', ("a.gguf", "coder=b.gguf", "x:1=c")),
                         ('[models]\ncoder = "b.gguf"\n', ("coder=b.gguf",)), ("[models]\n", ())):
        conf.write_text(text)
        assert config.load({}, str(conf), {})["model"].value == wanted


@pytest.mark.parametrize("text,words", [
    ("[models]\n'a b' = 'x'", "[models]"), ("[models]\na = 1", "[models]"), ("models = 3", "[models]"), ("[models.a]\nx = 1", "[models]"),
    ("model = 3\n[models]\na = 'x'", "model"),
    ("prot = 1", "did you mean port"), ("port = 'x'", "port"), ("port = ", "milad.conf"), ("\xff", "milad.conf"),
    ("[serving]\nport = 1", "serving"), ("protocols = ['gopher']", "protocols"), ("socket_mode = '999'", "socket_mode"),
    ("model = 3", "model")])
def test_mistakes_name_file_and_option(tmp_path, text, words):
    conf = tmp_path / "milad.conf"
    conf.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError) as e:
        config.load({}, str(conf), {})
    assert words in str(e.value) and str(conf) in str(e.value) and "\n" not in str(e.value).strip()


def test_a_bad_dotenv_names_the_line(tmp_path):
    (tmp_path / "milad.conf").write_text("")
    (tmp_path / ".env").write_text("A=1\nnonsense\n")
    with pytest.raises(UsageError, match="line 2"):
        config.load({}, str(tmp_path / "milad.conf"), {})
    (tmp_path / ".env").unlink()
    with pytest.raises(UsageError, match="no.conf"):
        config.load({}, str(tmp_path / "no.conf"), {})


def test_the_effective_configuration_reads_back(tmp_path):
    """`serve -T` is a milad.conf: read again it means the same, whatever the values."""
    odd = {"model": ['a "b"\\c.gguf', "d\te"], "log_file": "/ü/\u2028x", "socket_mode": "0600", "kv_memory": "3M",
           "temperature": 0.123, "protocols": ["openai"], "body_limit": 1025, "mlock": True, "port": 0}
    first = options.merge(("test", odd))
    text = options.effective_text(first)
    conf = tmp_path / "milad.conf"
    conf.write_text(text, "utf-8")
    second = config.load({}, str(conf), {})
    assert {n: v.value for n, v in first.items()} == {n: v.value for n, v in second.items()}
    assert set(tomllib.loads(text)) <= set(options.BY_NAME)
    for option in options.OPTIONS:
        assert f"\n{option.name} =" in text or f"\n# {option.name}:" in text


def test_help_names_every_option_and_default():
    import argparse
    parser = argparse.ArgumentParser()
    flags.add(parser)
    text = " ".join(parser.format_help().split())
    for option in options.OPTIONS:
        assert option.flag in text, option.name
        assert f"(default: {flags.default_text(option)})".split()[-1] in text
