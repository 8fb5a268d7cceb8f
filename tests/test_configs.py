"""Every file in configs/: its arguments, its keys, its published size, and one training step and sample of "tiny"."""

import functools
import importlib.util
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from PIL import Image

from jaxdiff import data, training
from jaxdiff.cli import configs
from jaxdiff.conditions import SEMANTIC
from jaxdiff.configs import default
from jaxdiff.data import sources
from jaxdiff.data.memory import in_memory
from jaxdiff.data.prompts import from_tables
from jaxdiff.methods import exported
from jaxdiff.training import state

FOLDER = Path(__file__).resolve().parents[1] / "configs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("__init__", "default"))
FREE = (  # their keys belong to what they configure
    "options",
    "fields",
    "sigma_options",
    "assignment_options",
    "solver_options",
    "weight_options",
    "score_weight_options",
    "curriculum",
)

# stored examples of data that are not here: shape and classes
STORED = {
    "cifar10": ((32, 32, 3), 10),
    "fashion": ((32, 32, 1), 10),
    "imagenet64": ((96, 80, 3), 1000),
    "imagenet256_dit": ((32, 32, 4), 1000),
    "imagenet64_edm2": ((96, 80, 3), 1000),
    "imagenet512_edm2": ((64, 64, 4), 1000),
    "folder": ((96, 80, 3), 10),
    "cifar10_sfd": ((32, 32, 3), 10),
    "cifar10_meanflow": ((32, 32, 3), 10),
    "imagenet64_sfd": ((96, 80, 3), 1000),
    "imagenet64_emd": ((96, 80, 3), 1000),
    "cifar10_score": ((32, 32, 3), 10),
    "imagenet64_score": ((96, 80, 3), 1000),
    "imagenet128_emd": ((150, 140, 3), 1000),
    "sd15_emd": ((64, 64, 4), 0),
    "cifar10_ct_immiscible": ((32, 32, 3), 10),
    "cifar10_ddim_immiscible": ((32, 32, 3), 10),
    "imagenet256_immiscible": ((32, 32, 4), 1000),
    "t2i512_mmdit": ((64, 64, 4), 0),
    "flux_sfd": ((128, 128, 16), 0),
    "flux_dmd": ((128, 128, 16), 0),
    "sd35_sfd": ((128, 128, 16), 0),
}
PATHS = ("folder",)  # configs whose argument is a path, so that any is allowed
# published parameter counts
PARAMETERS = {
    ("cifar10", ""): 55_733_891,
    ("cifar10", "cond"): 55_735_299,
    ("imagenet64", ""): 295_899_267,
    ("imagenet256_dit", ""): 674_834_720,
    ("imagenet256_dit", "S"): 32_865_056,
    ("imagenet256_dit", "B"): 130_315_808,
    ("imagenet256_dit", "L"): 457_840_672,
    ("imagenet64_edm2", ""): 280_210_021,
    ("imagenet512_edm2", ""): 280_213_477,
    ("cifar10_sfd", ""): 55_733_891 + 4_662_528,
    ("cifar10_sfd", "2"): 55_733_891,
    ("imagenet64_sfd", "blank"): 295_899_267 + 28_201_344,
    ("imagenet64_sfd", "5"): 295_899_267,
    ("imagenet64_emd", ""): 295_899_267,
    ("imagenet128_emd", "teacher"): 421_522_691,
    ("sd15_emd", ""): 859_520_964,
    ("imagenet256_immiscible", ""): 674_834_720,
    ("flux_sfd", ""): 11_901_408_320,
    ("flux_sfd", "full"): 11_901_408_320,
    ("flux_dmd", ""): 11_901_408_320,
    ("sd35_sfd", ""): 2_243_171_520 + 384**2 * 1536,
}
UPDATES = {
    "flux_sfd": 313_786_368,
    "flux_dmd": 313_786_368,
    "sd35_sfd": 64 * 1536 * (13 * 55 + 10 * 46 + 30),
}  # trained at rank 64


def module(name):
    """The file itself, as --config reads it."""
    spec = importlib.util.spec_from_file_location(f"config_{name}", FOLDER / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def arguments(name):
    """The arguments a config takes: those it declares."""
    return ["", "photos"] if name in PATHS else ["", *module(name).ARGUMENTS]


CASES = [(name, arg) for name in NAMES for arg in arguments(name)]
FULL = [(name, arg) for name, arg in CASES if not arg or (name, arg) in PARAMETERS]  # one of each network
# networks that another config of the default run builds as well
BUILT = {(name, "") for name in ("creatures", "imagenet64_emd", "imagenet64_sfd", "imagenet128_emd")}
BUILT |= {(name, "") for name in ("cifar10_score", "imagenet64_score")}


def promotion(config):
    """Flax's norms and jax.nn's attention promote half precision by themselves."""
    return jax.numpy_dtype_promotion("standard" if config.model.dtype == "bfloat16" else "strict")


def count(tree):
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))


def test_there_is_a_config_for_every_published_recipe():
    assert {"digits", "cifar10", "imagenet64", "imagenet256_dit", "mixture2d"} <= set(NAMES)
    assert {"digits_sfd", "cifar10_sfd", "imagenet64_sfd"} <= set(NAMES)
    assert {"mixture2d_emd", "digits_emd", "imagenet64_emd", "imagenet128_emd", "sd15_emd"} <= set(NAMES)
    assert {"digits_immiscible", "cifar10_ct_immiscible", "cifar10_ddim_immiscible"} <= set(NAMES)
    assert set(PARAMETERS) <= set(CASES)


@pytest.mark.parametrize(("name", "arg"), CASES)
def test_keys_and_types_are_those_of_the_default_and_locked(name, arg):
    config = module(name).get_config(arg)

    def compare(mine, declared, path):
        assert set(mine) == set(declared), path
        for key, value in declared.items():
            if isinstance(value, ConfigDict) and key not in FREE:
                compare(mine[key], value, f"{path}.{key}")
            else:
                assert type(mine[key]) is type(value), f"{path}.{key}"

    compare(config, default.get_config(), name)
    with pytest.raises(AttributeError, match="locked"):
        config.stray = 1
    with pytest.raises(AttributeError, match="locked"):
        config.optim.stray = 1


@pytest.mark.parametrize("name", [name for name in NAMES if name not in PATHS])
def test_arguments_are_a_literal_and_others_are_refused(name):
    """`jaxdiff configs` and completion read them without running the file."""
    assert configs.summary(FOLDER / f"{name}.py")[1] == module(name).ARGUMENTS
    for arg in ("no such argument", "tiny,no such argument"):
        with pytest.raises(ValueError, match=r"'no such argument'.*tiny"):
            module(name).get_config(arg)


def test_arguments_that_exclude_each_other():
    for name, arg in (("digits", "long,tiny"), ("cifar10_sfd", "2,3,blank")):
        with pytest.raises(ValueError, match=r"long.*tiny|2.*3"):
            module(name).get_config(arg)


def test_a_folder_called_tiny_is_a_folder():
    config = module("folder").get_config("tiny")
    assert (config.data.source, config.data.options.path) == ("folder", "tiny")


@pytest.mark.parametrize("name", NAMES)
def test_docstring_has_the_command_and_names_the_arguments(name):
    doc = module(name).__doc__
    assert re.search(rf"^    jaxdiff train --config={name}[: ].*--workdir=runs/", doc, re.MULTILINE), doc
    assert name in PATHS or "tiny" in arguments(name)
    named = [] if name in PATHS else [arg for arg in arguments(name) if arg not in ("", "tiny")]
    assert not [arg for arg in named if f"`:{arg}`" not in doc]


@pytest.mark.parametrize(
    ("name", "arg"), [pytest.param(*case, marks=[pytest.mark.slow] * (case in BUILT)) for case in FULL]
)
@pytest.mark.filterwarnings("ignore:.*noise levels lie outside")  # as published for SiD
def test_full_size_builds_and_has_the_published_number_of_parameters(name, arg, monkeypatch):
    """All of the config but its data is used; their constructor's options are checked, its result is a stand-in."""
    config = module(name).get_config(arg)
    if name in STORED and config.data.source != "blank":
        pooled = 2048 if name == "sd35_sfd" else 768
        stand_in(monkeypatch, config.data.source, *STORED[name], pooled)
    if isinstance(config.data.options.get("caption_text"), str):  # a folder that is not here
        with config.unlocked(), config.data.options.ignore_type():
            config.data.options.caption_text = (77, 768)
    with promotion(config):
        run, mesh = training.prepare(config)
        declared = state.declare(run, mesh)
    total = count(jax.eval_shape(exported, declared))
    assert total == PARAMETERS.get((name, arg), total)
    trained = count(declared.params["student"])
    assert trained == (UPDATES[name] if config.lora.rank else total)
    assert total == (count(declared.averages["ema"]) if config.method.name == "diffusion" else total)
    for number, unit in re.findall(r"([\d.]+) ([kM])\s+parameters", "" if arg else module(name).__doc__):
        assert total / {"k": 1e3, "M": 1e6}[unit] == pytest.approx(float(number), rel=5e-3)
    plain = name.startswith(("mixture2d", "cifar10", "digits_immiscible", "creatures"))
    unconditional = plain and arg not in ("cond", "cd")
    texts = {"sd15_emd": {"text"}, "flux_sfd": {"text", "pooled"}, "flux_dmd": {"text", "pooled"}}
    texts |= {"sd35_sfd": {"text", "pooled"}, "t2i512_mmdit": {"text", "text_mask"}, "t2i_small": {"text", "text_mask"}}
    assert set(run.conditions.null(SEMANTIC) or {}) == texts.get(name, set() if unconditional else {"label"})
    assert bool(run.conditions.num_classes) == ("label" in run.conditions)


def stand_in(monkeypatch, source, shape, classes, pooled=768):
    constructor = sources.SOURCES[source]

    @functools.wraps(constructor)
    def make(**options):
        inspect.signature(constructor).bind(**options)
        if source == "prompts":
            tables = {"text": np.zeros((3, 77, 768), np.float16)}
            if shape[-1] == 16:
                tables = {"text": np.zeros((3, 512, 4096), np.float16), "pooled": np.zeros((3, pooled), np.float16)}
            return from_tables("stand-in", tables, options["shape"], "")
        images = np.zeros((2, *shape), np.float32 if shape[-1] == 4 else np.uint8)
        if source == "latents":
            return in_memory("stand-in", images, None, caption_ids=np.arange(2), captions=("one", "two"))
        return in_memory("stand-in", images, np.arange(2), num_classes=classes)

    monkeypatch.setitem(sources.SOURCES, source, make)


# Compiling UNets takes most of a minute each; they are trained by the quickstart, and every method in tests/training.
COMPILED = ("imagenet256_dit", "mixture2d", "mixture2d_emd")
TRACED_BY_ANOTHER = {"imagenet64_emd": "digits_emd", "imagenet128_emd": "digits_emd"}  # the same step, larger
TRACED_BY_ANOTHER |= {"imagenet64_score": "cifar10_score"}


# the same method on a like network is traced by default for another config; the quickstart's test trains digits_emd
SECOND = ("cifar10_ddim_immiscible", "digits_immiscible", "digits_sfd", "digits_emd", "imagenet64", "imagenet64_sfd")
SECOND += ("sd15_emd", "t2i512_mmdit", "digits_meanflow")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in SECOND))
        for name in NAMES
        if name not in TRACED_BY_ANOTHER
    ],
)
@pytest.mark.filterwarnings("ignore:.*noise levels lie outside")  # as published for SiD
def test_tiny_trains_a_step_and_samples(name, tmp_path):
    config = small_folder(tmp_path) if name in PATHS else module(name).get_config("tiny")
    with promotion(config):
        run, mesh = training.prepare(config, jax.devices()[:1])
        batch = run.select(run.data.batch(0, config.data.batch_size))
        if name not in COMPILED:
            declared = state.declare(run, mesh)
            after, metrics = jax.eval_shape(run.method.step, declared, batch, jax.random.key(0))
            assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, declared) and "loss" in metrics
            return
        before = filled(state.declare(run, mesh))
        quick = {"xla_backend_optimization_level": 0}  # to compile
        after, metrics = jax.jit(run.method.step, compiler_options=quick)(before, batch, jax.random.key(1))
        images, labels = training.Sampler(run, mesh).sample(exported(after), 4, 0)
    assert metrics["loss"] > 0
    assert all(jnp.isfinite(value).all() for value in metrics.values()), metrics
    moved = jax.tree.map(lambda a, b: (a != b).any(), before.params, jax.device_get(after.params))
    assert all(jax.tree.leaves(moved)), moved
    assert images.shape == (4, *run.data.shape)
    assert np.isfinite(images).all()
    assert (labels is None) == ("label" not in run.conditions)


def small_folder(path):
    """configs/folder.py at small size, on a folder of four images in two classes."""
    for i in range(4):
        target = path / "photos" / f"class{i % 2}" / f"{i}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((12, 10, 3), 60 * i, np.uint8)).save(target)
    config = module("folder").get_config(str(path / "photos"))
    config.data.options.image_size, config.data.batch_size = 8, 4
    config.model.fields.update(resolution=8, width=8, channel_mult=(1, 2), blocks=1, attention=(4,))
    config.sample.timestamps, config.sample.count = 4, 4
    return config


def filled(declared):
    """A state of those shapes, its parameters random; compiling initialisers would take a third of this file's time."""
    rng = np.random.default_rng(0)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), declared)

    def draw(tree):
        return jax.tree.map(lambda leaf: 0.05 * rng.standard_normal(leaf.shape, leaf.dtype), tree)

    params = draw(declared.params)
    averages = dict.fromkeys(declared.averages, params["student"])
    return zeros.replace(params=params, averages=averages, frozen=draw(declared.frozen))


def test_unconditional_models_train_on_labelled_data():
    """num_classes = 0 keeps the labels from the network; the images of a batch are the same."""
    config = module("cifar10").get_config("tiny")
    run = training.build(config, training.load_data(config))
    assert (set(run.conditions), run.conditions.num_classes, run.guided) == ({"augment"}, 0, False)
    labelled = data.load(config.data.source, seed=config.seed, **config.data.options)
    batch = run.select(run.data.batch(3, 4))
    assert set(batch) == {"image", "augment"} and "label" in labelled.batch(3, 4)
    assert set(run.conditions.of(labelled.batch(3, 4))) == {"augment"}
    np.testing.assert_array_equal(batch["image"], labelled.batch(3, 4)["image"])


def test_latents_outside_the_pixel_range_reach_the_model_unchanged(tmp_path):
    """What imagenet256_dit reads: float32 [32 32 4] records of any range, with their labels."""
    latents = 3 * np.random.default_rng(0).standard_normal((4, 32, 32, 4)).astype(np.float32)
    examples = ({"image": latent, "label": 250 * i} for i, latent in enumerate(latents))
    data.write_array_records(tmp_path / "train.array_record", examples, num_classes=1000)
    config = module("imagenet256_dit").get_config("S")
    config.data.options.path = str(tmp_path)
    config.data.batch_size = 4
    run = training.build(config, training.load_data(config))
    batch = run.select(run.data.batch(0, 4))
    order = batch["label"] // 250
    assert sorted(order) == [0, 1, 2, 3]
    np.testing.assert_array_equal(batch["image"], latents[order])
    null = run.conditions.null(SEMANTIC)
    assert (run.model.channels, run.model.num_classes, null) == (4, 1000, {"label": 1000})
