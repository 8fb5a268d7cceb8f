"""What is printed without a run: version, help, configs, completion; and that none of it waits for JAX."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jaxdiff
from jaxdiff import cli
from jaxdiff.cli import complete, configs

ROOT = Path(__file__).resolve().parents[2]


def printed(capsys, *arguments):
    assert cli.main(list(arguments)) == 0
    return capsys.readouterr().out


def test_version(capsys):
    assert printed(capsys, "--version") == f"jaxdiff {jaxdiff.__version__}\n"


def test_help_has_one_line_for_every_command_then_examples(capsys):
    commands, _, examples = printed(capsys, "--help").partition("Examples:")
    listed = [line for line in commands.splitlines() if line.startswith("  ")]
    assert [line[2:20].strip() for line in listed] == list(cli.COMMANDS)
    assert all(len(line) <= 120 and line[21:].endswith(".") for line in listed)
    assert "jaxdiff train --config=digits" in examples
    assert cli.main([]) == 2


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_a_command_has_every_flag_and_where_keys_are_documented(name, capsys):
    for flag in ("--help", "-h"):
        text = printed(capsys, *name.split(), flag)
        for known in cli.COMMANDS[name].flags:
            assert f"  --{known.name}" in text and known.help[:40] in text
        assert ("configs/default.py" in text) == bool(cli.COMMANDS[name].config)
    assert all(len(line) <= 120 for line in text.splitlines())


def test_help_of_a_group(capsys):
    assert printed(capsys, "features", "--help").count("jaxdiff features ") == 4


def test_help_with_a_config_lists_its_keys_as_they_are_overridden(capsys):
    text = printed(capsys, "train", "--config=mixture2d:tiny", "--config.train.steps=9", "--help")
    assert "--config.train.steps=9 " in text and "optimizer steps" in text
    assert "--config.emd.score_updates=1 " in text and "--config.sfd.lpips.pool=max " in text
    assert "--config.model.fields.width=16" in text


def test_configs_are_listed_with_their_purpose_and_arguments(capsys):
    text = printed(capsys, "configs")
    for name in configs.names():
        assert f"\n{name} " in f"\n{text}"
    assert "Class-conditional teacher on the embedded 8x8 digits" in text
    assert ":tiny" in text and ":PATH" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["configs"],
        ["train", "--help"],
        ["features", "score", "--help"],
        ["completion", "bash"],
        ["__complete", "bash", "jaxdiff train --config."],
        ["trian"],
        ["sample", "--count=0"],
    ],
)
def test_nothing_of_this_imports_jax(arguments):
    code = f"import sys, jaxdiff.cli; jaxdiff.cli.main({arguments!r}); print('jax' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stderr.splitlines()[-1] == "False"


def test_it_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "jaxdiff.cli", "--version"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, f"jaxdiff {jaxdiff.__version__}\n")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("jaxdiff ev", ["evaluate"]),
        ("jaxdiff fea", ["features"]),
        ("cd x; VAR=1 bin/jaxdiff  ev", ["evaluate"]),
        ("jaxdiff features s", ["score", "show"]),
        ("jaxdiff completion f", ["fish"]),
        ("jaxdiff train --dr", ["--dry_run"]),
        ("jaxdiff features show --sig", ["--sigma="]),
        ("jaxdiff plan --config=mixture2d_", ["--config=mixture2d_emd", "--config=mixture2d_sfd"]),
        ("jaxdiff train --config=digits:l", ["--config=digits:long"]),
        ("jaxdiff train --config.optim.learn", ["--config.optim.learning_rate="]),
        ("jaxdiff train --config.emd.score_u", ["--config.emd.score_updates="]),
        (
            "jaxdiff train --config.emd.ste",
            [f"--config.emd.{name}=" for name in ("steps", "step_eps", "step_z", "step_x")],
        ),
        (
            "jaxdiff train --config.sfd.lpips",
            [f"--config.sfd.lpips.{name}=" for name in ("weights", "net", "pool", "resize", "as_unit")],
        ),
        ("jaxdiff sample --config.diffusion.cond", ["--config.diffusion.cond_dropout="]),
        ("jaxdiff features show --ima", ["--images="]),
        ("jaxdiff sample --labels=r", ["--labels=random"]),
        ("jaxdiff train --config digits_s", ["digits_sfd"]),
        ("jaxdiff sample --labels c", ["cycle"]),
        ("jaxdiff sample --config=", []),
        ("jaxdiff sample --config dig", []),
        ("jaxdiff train --workdir=ru", []),
        ("jaxdiff nothing --", []),
    ],
)
def test_completion(line, found):
    assert complete.candidates("zsh", line, cli.COMMANDS) == found


def test_bash_replaces_what_follows_the_last_break():
    assert complete.candidates("bash", "jaxdiff train --config=digits:l", cli.COMMANDS) == ["long"]
    assert complete.candidates("bash", "jaxdiff plan --config=mixture2d_s", cli.COMMANDS) == ["mixture2d_sfd"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_the_script_completes_in_bash(tmp_path):
    script = tmp_path / "jaxdiff"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m jaxdiff.cli "$@"\n')
    script.chmod(0o755)
    ask = "source <(jaxdiff completion bash); COMP_LINE='jaxdiff train --config=digits_s'; COMP_POINT=${#COMP_LINE}; "
    ask += 'complete -p jaxdiff; _jaxdiff; echo "${COMPREPLY[@]}"'
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines() == ["complete -o default -F _jaxdiff jaxdiff", "digits_sfd"], done.stderr


def test_other_shells(capsys):
    assert "compdef _jaxdiff jaxdiff" in printed(capsys, "completion", "zsh")
    assert printed(capsys, "completion", "fish").startswith("complete -c jaxdiff")
    assert cli.main(["completion", "tcsh"]) == 2
    assert "bash, zsh, fish" in capsys.readouterr().err
