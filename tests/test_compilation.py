"""Compiler options by platform."""

import jax
import jax.numpy as jnp
import pytest

from jaxdiff import compilation


def test_options_follow_the_platform():
    assert compilation.options("cuda") is None
    assert compilation.options("tpu") is None
    assert compilation.options("tpu", gather_first=True) == compilation.GATHER_FIRST
    assert compilation.options("cpu", gather_first=True) in (compilation.CPU, None)


def test_programs_compile_with_the_options_of_this_machine():
    double = jax.jit(lambda x: 2 * x, compiler_options=compilation.options("cpu"))
    assert double(jnp.float32(2)) == 4


def test_options_that_this_version_does_not_know_are_left_out(monkeypatch):
    monkeypatch.setattr(compilation, "CPU", {"xla_cpu_no_such_option": "true"})
    compilation._cpu_knows.cache_clear()
    try:
        assert compilation.options("cpu") is None
        with pytest.raises(Exception, match="xla_cpu_no_such_option"):
            jax.jit(lambda: 0, compiler_options=compilation.CPU)()
    finally:
        compilation._cpu_knows.cache_clear()
