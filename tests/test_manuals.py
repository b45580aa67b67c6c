"""Manuals, sample configuration and completion against the option table and the parsers; rendering without warnings."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT
from milad import options
from milad.cli import completion, main as cli

PAGES = sorted((ROOT / "man").glob("milad*.[158]"))


def test_they_say_what_the_table_says():
    done = subprocess.run([sys.executable, ROOT / "scripts" / "make-manuals", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + "run scripts/make-manuals"


def test_every_option_ends_with_its_default():
    """Read from the page, without the script that writes it."""
    text = (ROOT / "man" / "milad.conf.5").read_text()
    entries = re.split(r"^\.It Ic ", text, flags=re.M)[1:]
    names = [entry.split()[0] for entry in entries]
    assert sorted(names) == sorted(options.BY_NAME)
    for name, entry in zip(names, entries):
        body = re.split(r"^\.(?:El|Ss|Sh)", entry, flags=re.M)[0].replace("\n", " ")
        assert "The default is " in body and body.rstrip().endswith("."), name
        assert f".Ev MILAD_{name.upper()}" in body and all(f".Ev {n}" in body for n in options.BY_NAME[name].env)
        assert ("A reload takes it." in body) == options.BY_NAME[name].reload


def test_the_commands_page_has_every_command():
    text = (ROOT / "man" / "milad.1").read_text()
    for name in cli.COMMANDS:
        assert re.search(rf"^\.It Ic {name}\b", text, re.M), name


def test_the_daemons_page_has_every_metric(default_model):
    from types import SimpleNamespace

    from milad import metrics
    engine = SimpleNamespace(stats=lambda: {key: 1 for _, _, _, key, _ in metrics._ENGINE} | {"disk": {k: 1 for _, _, _, k in metrics._DISK}})
    info = SimpleNamespace(architecture="llama", quantisation="Q4_1")
    served = SimpleNamespace(id="m", runner=SimpleNamespace(n_ctx=1, engine=engine, model=SimpleNamespace(info=info)))
    text = (ROOT / "man" / "milad.8").read_text()
    for name in re.findall(r"^# TYPE (milad_\w+)", metrics.prometheus(metrics.Metrics(), served, 1.0, 1), re.M):
        assert name in text, name


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
@pytest.mark.parametrize("command", [["mandoc", "-Tlint", "-Wwarning"], ["groff", "-mdoc", "-Tutf8", "-ww", "-z"]], ids=lambda c: c[0])
def test_they_render_without_warnings(command, page):
    if not shutil.which(command[0]):
        pytest.skip(f"no {command[0]}")
    done = subprocess.run([*command, page], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout + done.stderr == ""


@pytest.mark.parametrize("topic,word", [("conf", "drain_timeout"), ("milad.8", "SIGHUP"), ("milad", "completion"), ("serve", "SIGUSR1")])
def test_help_shows_them_also_without_a_formatter(topic, word, capfd, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert cli.main(["help", topic]) == 0
    out = capfd.readouterr().out
    assert word in out and "\n." not in out and "\\e" not in out


def test_help_on_commands_and_on_nothing(capsys):
    with pytest.raises(SystemExit) as e:
        cli.main(["help", "pull"])
    assert e.value.code == 0 and "usage: milad pull" in capsys.readouterr().out
    assert cli.main(["help", "nothing"]) == 2 and "no page" in capsys.readouterr().err


def test_the_sample_configuration_is_one(tmp_path):
    """Every option, commented out with its default; uncommented it is still read."""
    from milad import config
    text = (ROOT / "scripts" / "init" / "milad.conf").read_text()
    given = dict(re.findall(r"^#(\w+) = (.*)$", text, re.M))
    assert list(given) == [o.name for members in options.groups().values() for o in members]
    (tmp_path / "milad.conf").write_text(text)
    assert all(v.source == "default" for v in config.load({}, str(tmp_path / "milad.conf"), {}).values())
    whole = "\n".join(f"{n} = {v}" for n, v in given.items() if options.BY_NAME[n].default not in (None, ()))
    (tmp_path / "milad.conf").write_text(whole)
    found = config.load({}, str(tmp_path / "milad.conf"), {})
    assert {n: v.value for n, v in found.items()} == {o.name: o.default for o in options.OPTIONS}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_command_and_flag(shell):
    text = completion.script(shell)
    for command in cli.COMMANDS:
        assert command in text
    for option in options.OPTIONS:
        assert option.flag.removeprefix("--") in text, option.name
        for choice in option.choices:
            assert choice in text
    if shutil.which(shell):
        done = subprocess.run([shell, "-n"], input=text, capture_output=True, text=True)
        assert done.returncode == 0 and done.stderr == ""
    elif shell != "bash":
        pytest.skip(f"no {shell} to read it with")


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
@pytest.mark.parametrize("line,wanted", [
    ("milad ser", {"serve"}), ("milad serve --kv-t", {"--kv-type"}), ("milad serve --kv-type ", {"f16", "q8_0"}),
    ("milad key ", {"add", "list", "remove"}), ("milad serve --log-format j", {"json"}), ("milad completion z", {"zsh"})])
def test_bash_completes(line, wanted):
    words = line.split(" ")
    program = (completion.script("bash") + f"COMP_WORDS=({' '.join(repr(w) for w in words)}); COMP_CWORD={len(words) - 1}\n"
               "_milad; printf '%s\\n' \"${COMPREPLY[@]}\"")
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True)
    assert wanted <= set(done.stdout.split()) and done.stderr == ""
    assert all(w.startswith(words[-1]) for w in done.stdout.split())


ONE_MATCH = [("milad ser", "serve"), ("milad serve --kv-ty", "--kv-type"), ("milad serve --kv-type q", "q8_0"), ("milad key rem", "remove"),
             ("milad completion z", "zsh"), ("milad serve --log-format j", "json")]


@pytest.mark.skipif(not shutil.which("fish"), reason="no fish")
@pytest.mark.parametrize("line,wanted", [*ONE_MATCH, ("milad --v", "--version")])
def test_fish_completes(line, wanted, tmp_path):
    done = subprocess.run(["fish", "-N", "-c", f"source; complete -C '{line}'"], input=completion.script("fish"), capture_output=True, text=True,
                          env={**os.environ, "HOME": str(tmp_path)})
    assert [found.split("\t")[0] for found in done.stdout.splitlines()] == [wanted] and done.stderr == ""


@pytest.mark.skipif(not shutil.which("zsh"), reason="no zsh")
@pytest.mark.parametrize("setup", ["fpath=($PWD $fpath); compinit -D -u", "compinit -D -u; . ./_milad"], ids=["autoloaded", "sourced"])
def test_zsh_completes(setup, tmp_path):
    """At a terminal of its own: a line, Tab, and what the line has become. Autoloaded, the first Tab already."""
    (tmp_path / "_milad").write_text(completion.script("zsh"))
    for line, wanted in ONE_MATCH:
        program = f"""
            zmodload zsh/zpty && zpty z zsh -f -i
            zpty -w z 'PS1= PS2=; autoload -Uz compinit; {setup}; show() {{ print -r -- "<<$BUFFER>>" }}; zle -N show; bindkey ^Xs show; print ready$((1+1))'
            zpty -r -m z out '*ready2*' && zpty -n -w z "{line}"$'\\t\\x18s' && zpty -r -m z out '*<<*>>*'
            print -r -- ${{${{out##*<<}}%%>>*}}; zpty -d z"""
        done = subprocess.run(["zsh", "-f", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.stdout.split() == [*line.split()[:-1], wanted] and done.stderr == ""
