"""Examples of the API reference: those in docstrings run here, those on pages with the other blocks; who has none is listed."""

import doctest
import importlib
import inspect
import re

import jax
import pytest
from doc_blocks import blocks, pages
from test_docs_site import public_names

MODULES = [
    "jaxdiff.denoisers",
    "jaxdiff.denoisers.base",
    "jaxdiff.denoisers.guidance",
    "jaxdiff.schedules",
    "jaxdiff.solvers.grids",
    "jaxdiff.solvers.sample",
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    with jax.numpy_dtype_promotion("standard"):
        found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0 and found.failed == 0


# functions whose examples need files or a text-conditioned run: what tests them
ELSEWHERE = {
    "jaxdiff.features.granularity": "tests/features",
    "jaxdiff.features.heat_map": "tests/features",
    "jaxdiff.features.locality": "tests/features",
    "jaxdiff.features.noise_leak": "tests/features",
    "jaxdiff.models.from_nnx": "tests/own",
    "jaxdiff.training.open_teacher": "tests/own",
    "jaxdiff.training.save_teacher": "tests/own",
    "jaxdiff.weights.lora_kind": "tests/weights",
    "jaxdiff.weights.save_lora": "tests/weights",
    "jaxdiff.training.from_dataset": "tests/test_t2i.py",
    "jaxdiff.training.from_examples": "tests/test_t2i.py",
    "jaxdiff.training.from_prompts": "tests/test_t2i.py",
}


def without_example():
    """Public functions that neither a docstring with >>> nor an executed block names."""
    code = "\n".join(block.code for page in pages() for block in blocks(page, "python") if not block.reason)
    used = set(re.findall(r"\w+", code))
    return [
        name
        for name, value in public_names().items()
        if inspect.isfunction(value) and name.rpartition(".")[2] not in used and ">>>" not in (value.__doc__ or "")
    ]


def test_every_public_function_has_an_example_that_is_executed():
    assert set(without_example()) == set(ELSEWHERE)
