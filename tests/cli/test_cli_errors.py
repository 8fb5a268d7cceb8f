"""Which errors become one line: those that jaxdiff raises itself; all others show where they come from."""

import numpy as np
import pytest

from jaxdiff import cli, errors, solvers
from jaxdiff.cli import configs
from jaxdiff.errors import raised_on_purpose


def caught(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def module(source, name):
    """A function `f` of a module of that name."""
    scope = {"__name__": name}
    exec(compile(source, f"{name}.py", "exec"), scope)
    return scope["f"]


@pytest.mark.parametrize(
    ("statement", "own"),
    [
        ("raise ValueError('bad')", True),
        ("raise FileNotFoundError('no file')", True),
        ("raise ImportError('pip install it')", True),
        ("raise TypeError('a str, got 3')", True),
        ("raise KeyError('bug')", False),
        ("raise AttributeError('bug')", False),
        ("raise AssertionError('bug')", False),
        ("{}['bug']", False),
        ("None.bug", False),
        ("1 / 0", False),
        ("int('x')", False),  # the interpreter's, though in our frame
        ("len(3)", False),
        ("open('/no/such/file')", False),
        ("import numpy; numpy.zeros(3).reshape(2, 2)", False),
        ("import jax.numpy; jax.numpy.zeros(3).reshape(2, 2)", False),
        ("import json; json.loads('{')", False),
    ],
)
def test_only_raise_statements_of_the_package_are_for_the_user(statement, own):
    assert raised_on_purpose(caught(module(f"def f(): {statement}", "jaxdiff.thing"))) is own
    assert not raised_on_purpose(caught(module(f"def f(): {statement}", "other.thing")))


def test_errors_raised_from_others_and_through_context_managers():
    source = "def f():\n  try: open('/no/such/file')\n  except OSError as error: raise OSError('no file') from error"
    assert raised_on_purpose(caught(module(source, "jaxdiff.thing")))
    again = "def f():\n  try: open('/no/such/file')\n  except OSError: raise"
    assert not raised_on_purpose(caught(module(again, "jaxdiff.thing")))
    inside = (
        "import contextlib\n@contextlib.contextmanager\ndef c(): yield\ndef f():\n  with c(): raise ValueError('x')"
    )
    assert raised_on_purpose(caught(module(inside, "jaxdiff.thing")))
    assert raised_on_purpose(caught(solvers.make, "no such solver")) and not raised_on_purpose(
        ValueError("never raised")
    )
    assert raised_on_purpose(caught(errors.check_sigma, np.zeros(2)))


@pytest.fixture
def config(tmp_path):
    """Writes a config file of the user's own and returns the arguments that use it."""

    def write(body):
        (tmp_path / "mine.py").write_text(f"def get_config(arg=''):\n    {body}\n")
        return ["train", f"--config={tmp_path}/mine.py", f"--workdir={tmp_path}/run"]

    return write


def test_what_a_config_raises_is_for_its_user_and_its_bugs_are_not(config, capsys):
    assert cli.main(config("raise ValueError('this config needs an argument')")) == 2
    assert capsys.readouterr().err == "jaxdiff train: this config needs an argument\n"
    with pytest.raises(ZeroDivisionError):
        cli.main(config("1 / 0"))
    assert configs.MODULE.isidentifier()


def test_traceback_shows_where_an_error_was_raised(config, capsys):
    assert cli.main([*config("raise ValueError('bad')"), "--traceback"]) == 2
    said = capsys.readouterr().err
    assert "Traceback" in said and "mine.py" in said and said.endswith("jaxdiff train: bad\n")
    assert cli.main(["--traceback", "trian"]) == 2
    assert "Traceback" in capsys.readouterr().err
