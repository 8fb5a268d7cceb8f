"""Code on the pages: Python is executed, page by page in one namespace; commands have existing flags, keys and files."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from doc_blocks import ROOT, Block, blocks, commands, pages, runnable
from PIL import Image

from jaxdiff import cli, models, weights
from jaxdiff.cli import configs
from jaxdiff.cli.flags import UsageError, parse
from jaxdiff.cli.options import override
from jaxdiff.configs import default
from jaxdiff.training import train

PAGES = pages()
SLOW = ("docs/stable_diffusion.md",)  # pages that take tens of seconds
OTHERS = {"python3", "pip", "export", "source", "git", "cd", "tensorboard"}  # words of commands that are not checked


def having(language):
    found = [page for page in PAGES if blocks(page, language)]
    return pytest.mark.parametrize("page", found, ids=[str(page.relative_to(ROOT)) for page in found])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the pages' code runs: runs/digits is a short run, photos a folder of images."""
    root = tmp_path_factory.mktemp("pages")
    train(configs.load("digits:tiny"), root / "runs" / "digits", quiet=True, devices=jax.devices()[:1])
    rng = np.random.default_rng(0)
    for kind in ("cat", "dog"):
        (root / "photos" / kind).mkdir(parents=True)
        for i in range(2):
            Image.fromarray(rng.integers(0, 255, (40, 40, 3), np.uint8)).save(root / "photos" / kind / f"{i}.png")
    return root


def write_stable_diffusion(root):
    """Small networks in the layout of Stable Diffusion 1.5, whose widths are those that tell the number of heads."""
    words = ["<|startoftext|>", "?", "a", "red", "fox", "<|endoftext|>"]
    rules = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    rules.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    ends = [(words[0], 0), (words[-1], len(words) - 1)]
    rules.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{words[0]} $A {words[-1]}", special_tokens=ends
    )
    for name in ("tokenizer", "text_encoder", "unet", "vae"):
        (root / name).mkdir(parents=True)
    rules.save(str(root / "tokenizer" / "tokenizer.json"))
    text = models.CLIPText(vocabulary=len(words), depth=1, mlp_width=8, eos=len(words) - 1)
    unet = models.LatentUNet(width=32, channel_mult=(1, 2), blocks=1, depths=(1, 0))
    vae = models.AutoencoderKL(width=32, channel_mult=(1, 1, 1, 1), blocks=1)
    small = jnp.zeros((1, 8, 8, 4))
    cond = {"text": jnp.zeros((1, 77, 768))}
    for model, kind, file, arguments in (
        (text, "clip_text", "text_encoder/model", (jnp.zeros((1, 77), jnp.int32),)),
        (unet, "sd_unet", "unet/diffusion_pytorch_model", (small, jnp.zeros(1), cond)),
        (vae, "sd_vae", "vae/diffusion_pytorch_model", (jnp.zeros((1, 16, 16, 3)),)),
    ):
        shapes = jax.eval_shape(model.init, jax.random.key(0), *arguments)["params"]
        params = jax.tree.map(small_noise, shapes)
        weights.save(model, params, kind, root / f"{file}.safetensors")


def small_noise(leaf):
    return 0.02 * np.random.default_rng(0).standard_normal(leaf.shape, np.float32)


def reader_environment():
    """This process's, without the simulated devices and strict dtypes of the tests; the package is importable."""
    env = {name: value for name, value in os.environ.items() if name != "JAX_NUMPY_DTYPE_PROMOTION"}
    flags = [flag for flag in env.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    return env | {"XLA_FLAGS": " ".join(flags), "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_python_runs_as_pasted(folder, slow):
    """In one process without the tests' type checks, as a reader has it."""
    names = [str(page.relative_to(ROOT)) for page in PAGES if blocks(page, "python")]
    names = [name for name in names if (name in SLOW) == slow]
    if slow:
        write_stable_diffusion(folder / "sd15")
    command = [sys.executable, Path(__file__).parent / "run_pages.py", *names]
    done = subprocess.run(command, cwd=folder, env=reader_environment(), capture_output=True, text=True)
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"page"')]
    assert [record["page"] for record in records] == names, done.stderr[-4000:]
    assert not [record for record in records if record["error"]], "\n".join(record["error"] for record in records)


def test_the_readme_begins_with_python_that_runs():
    assert not blocks(ROOT / "README.md", "python")[0].reason


@having("bash")
def test_commands_exist(page):
    for block in blocks(page, "bash"):
        for words in commands(block) if not block.reason else ():
            try:
                check(words)
            except (UsageError, ValueError, AssertionError) as error:
                raise AssertionError(f"{block.name}: {' '.join(words)}: {error}") from error


def check(words: list[str]) -> None:
    """A command of the package with its flags and config keys, a module, an extra, or a file of the repository."""
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):  # variables before a command
        words = words[1:]
    first = os.path.basename(words[0])
    if first == "jaxdiff":
        check_command(words[1:])
    elif first == "python" and words[1] == "-m":
        assert importlib.util.find_spec(words[2]), words[2]
    elif first == "pip":
        extras = re.findall(r"\[([\w,]+)\]", " ".join(words))
        declared = (ROOT / "setup.py").read_text()
        assert all(f'"{extra}": [' in declared for group in extras for extra in group.split(",")), extras
    elif first not in OTHERS:
        script = next(word for word in words if not word.startswith("-"))
        assert (ROOT / script).exists(), script


def check_command(words: list[str]) -> None:
    name = next((known for known in cli.COMMANDS if words[: len(known.split())] == known.split()), "")
    assert name, f"unknown command {words[:2]}"
    given = parse(name, cli.COMMANDS[name], words[len(name.split()) :])
    config = default.get_config()
    if given.config and not given.config.isupper():  # NAME stands for one of the reader's
        recipe = given.config.partition(":")[0] in configs.recipes()
        config = config if recipe else configs.load(given.config)
    override(config, given.overrides)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_within_the_repository_exist(page):
    """Relative links of a page point to files; the site's build checks their anchors."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"\w+:", target) and not target.startswith("#"):
            found = (page.parent / target.partition("#")[0]).resolve()
            if found.is_relative_to(ROOT / "docs" / "notebooks"):  # where the site's build copies them
                found = ROOT / found.relative_to(ROOT / "docs")
            assert found.exists(), f"{page.name} links to {target}"


def test_marks_are_read():
    page = ROOT / "docs" / "x.md"
    changed = runnable(Block(page, 5, "python", "n = 100\nm = n + 1\n", values="n = 2"))
    names = {}
    exec(compile(changed, "x", "exec"), names)
    assert names["m"] == 3
    with pytest.raises(AssertionError, match="assigns no k"):
        runnable(Block(page, 5, "python", "n = 100\n", values="k = 2"))


@pytest.mark.parametrize(
    "line",
    [
        "jaxdiff train --config=digit --workdir=a",
        "jaxdiff train --config=digits --work=a",
        "jaxdiff train --config=digits --config.train.step=3",
        "jaxdiff trains",
        "python -m experiments.nothing",
        'pip install ".[nothing]"',
        "experiments/launch/nothing.sh",
    ],
)
def test_wrong_commands_are_found(line):
    block = Block(ROOT / "docs" / "x.md", 1, "bash", line)
    with pytest.raises((UsageError, AssertionError)):
        check(commands(block)[0])
