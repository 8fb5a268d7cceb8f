"""A command that computes restarts once, with the same arguments and huge pages."""

import os
import sys

import pytest

from jaxdiff import cli
from jaxdiff.cli import huge_pages


@pytest.fixture
def restarts(monkeypatch):
    seen = []
    monkeypatch.setattr(os, "execv", lambda *call: seen.append(call))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "jaxdiff.cli", "train", "--help"])
    monkeypatch.setattr(sys, "argv", ["jaxdiff", "train", "--help"])
    monkeypatch.setenv(huge_pages.VARIABLE, "")
    monkeypatch.delenv(huge_pages.VARIABLE)
    return seen


def test_the_command_line_restarts_once(restarts):
    assert cli.main() == 0  # execv is a stub here, so the command runs too
    assert restarts == [(sys.executable, sys.orig_argv)]
    assert os.environ[huge_pages.VARIABLE] == huge_pages.VALUE
    cli.main()
    assert len(restarts) == 1


def test_calls_from_python_and_light_commands_do_not(restarts, monkeypatch):
    cli.main(["train", "--help"])
    monkeypatch.setattr(sys, "argv", ["jaxdiff", "configs"])
    cli.main()
    assert not restarts


def test_settings_of_the_user_are_left_alone(restarts, monkeypatch):
    monkeypatch.setenv(huge_pages.VARIABLE, "glibc.malloc.check=0")
    cli.main()
    assert not restarts and os.environ[huge_pages.VARIABLE] == "glibc.malloc.check=0"
