"""The option table: conversion, layers, sources, errors that name option and place."""

import math

import pytest

from milad import options
from milad.errors import UsageError


def test_layers_and_sources():
    values = options.merge(("milad.conf", {"port": 9000, "keepalive": 3}),
                           *options.from_environment({"MILA_PORT": "1", "MILAD_PORT": "81", "MILAD_HOST": ""}),
                           ("flag {name}", {"ctx": "4096"}))
    assert values["port"] == options.Value(81, "MILAD_PORT")
    assert values["keepalive"] == options.Value(3.0, "milad.conf")
    assert values["ctx"] == options.Value(4096, "flag --ctx")
    assert values["host"] == options.Value("127.0.0.1", "default")


@pytest.mark.parametrize("name,raw,value", [
    ("kv_cache_disk", "2G", 2 << 30), ("kv_cache_disk", "512MiB", 512 << 20), ("kv_cache_disk", 0, 0),
    ("kv_cache_disk", "1.5g", 3 << 29), ("keepalive", "2.5s", 2.5), ("tools", True, "on"), ("tools", "FALSE", "off"),
    ("tools", "auto", "auto"), ("strict_model_names", "yes", True), ("model", "a.gguf", ("a.gguf",)),
    ("allowed_hosts", ["a", "b"], ("a", "b")), ("temperature", 0, 0.0)])
def test_conversion(name, raw, value):
    got = options.convert(options.BY_NAME[name], raw, "test")
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize("name,raw", [
    ("port", "http"), ("port", 65536), ("port", -1), ("port", True), ("port", 1.5), ("port", "9" * 400), ("ctx", 0),
    ("keepalive", "nan"), ("keepalive", "inf"), ("keepalive", 0), ("temperature", "-1"), ("temperature", math.nan),
    ("kv_memory", "lots"), ("kv_memory", "1e400"), ("kv_memory", ""), ("host", ""), ("host", 3), ("host", "a\0b"),
    ("tools", "maybe"), ("kv_type", "f32"), ("allowed_hosts", [1]), ("strict_model_names", "perhaps")])
def test_bad_values_name_option_and_source(name, raw):
    with pytest.raises(UsageError) as e:
        options.convert(options.BY_NAME[name], raw, "/etc/milad/milad.conf")
    assert name in str(e.value) and "/etc/milad/milad.conf" in str(e.value) and "\n" not in str(e.value)


def test_unknown_keys_suggest_the_nearest():
    with pytest.raises(UsageError, match="did you mean port"):
        options.merge(("milad.conf", {"prot": 1}))


def test_the_table_itself():
    for option in options.OPTIONS:
        assert option.help and "\n" not in option.help and not option.help.endswith("."), option.name
        assert option.unset == (option.default is None), option.name
        if option.default is None:
            assert option.shown, f"{option.name}: say what happens by default"
        elif option.kind != "list":
            assert options.convert(option, option.default, "default") == option.default
