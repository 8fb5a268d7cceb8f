"""`jaxdiff features`: what its commands write, from a run and from public weights, and what they say of mistakes."""

import csv
import itertools
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from jaxdiff import data, features, training, weights
from jaxdiff.cli import main
from jaxdiff.configs import imagenet256_dit, t2i_small
from jaxdiff.data import spec
from jaxdiff.features import probes, scoring, store
from jaxdiff.training import export, parameters

CONFIG = ["--config=imagenet256_dit:tiny", "--config.model.dtype=float32"]
COUNT = 20


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run whose parameters are random, its model and parameters. The blocks are scanned."""
    workdir, config = tmp_path_factory.mktemp("run"), imagenet256_dit.get_config("tiny")
    config.model.dtype = "float32"
    run = training.build(config, training.load_data(config))
    rng = np.random.default_rng(0)
    draw = lambda s: jnp.asarray(rng.normal(size=s.shape) * 0.2, jnp.float32)  # noqa: E731
    params = jax.tree.map(draw, parameters.shapes_of(run.model, run.conditions, run.data.shape))
    write_run(workdir, config, run.data, params)
    return workdir, run.model, params


def write_run(workdir, config, dataset, params):
    export.write_config(workdir, config)
    spec.write(workdir, dataset)
    export.write(workdir, params)


@pytest.fixture(scope="module")
def digits():
    """The first images in stored order, and their labels."""
    rows = data.load("digits", shuffle=False).take(0, COUNT)
    return rows["image"], rows["label"]


def test_extract_is_extraction_under_the_null_label_on_all_devices(run, digits, tmp_path, capsys):
    workdir, model, params = run
    out = tmp_path / "f"
    flags = ["--select=blocks_1/out in", "--sigma=0.4", f"--count={COUNT}", "--seed=3", "--shard=16", f"--out={out}"]
    assert main(["features", "extract", f"--workdir={workdir}", *flags]) == 0
    assert f"wrote 2 activations of {COUNT} images at sigma 0.4" in capsys.readouterr().out
    shards = list(store.read(out))
    assert [len(shard["label"]) for shard in shards] == [16, 4] and store.index(out)["about"]["sigma"] == 0.4
    null = {"label": jnp.full(COUNT, 10)}
    expected = features.extract(model, params, jnp.asarray(digits[0]), 3, 0.4, null, ["in", "blocks_1/out"])
    for name, value in {**expected, "label": digits[1]}.items():
        np.testing.assert_allclose(np.concatenate([shard[name] for shard in shards]), value, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def prompted(tmp_path_factory):
    """The folder of a text-conditioned UNet whose parameters are random, and the run."""
    workdir, config = tmp_path_factory.mktemp("prompted"), t2i_small.get_config("tiny,latent_unet")
    config.denoiser.kind, config.denoiser.schedule = "ddpm", "sqrt_linear"
    config.noise.sigma_sampler, config.diffusion.weight = "discrete", "eps"
    run = training.build(config, training.load_data(config))
    rng = np.random.default_rng(0)
    draw = lambda s: jnp.asarray(rng.normal(size=s.shape) * 0.2, jnp.float32)  # noqa: E731
    params = jax.tree.map(draw, parameters.shapes_of(run.model, run.conditions, run.data.shape))
    write_run(workdir, config, run.data, params)
    return workdir, run, params


def test_prompts_timesteps_and_names_of_the_reference(prompted, tmp_path, capsys):
    workdir, run, params = prompted
    words, names = "a red circle", ["up1_transformer0/block0/cross_attention/q", "up/cross_maps"]
    rows = run.data.text([words])
    np.savez(tmp_path / "embedded.npz", **rows)
    select = "--select=up-level0-repeat0-vit-block0-cross-q attn-up_cross"
    given = ["features", "extract", f"--workdir={workdir}", select, "--timestep=50", "--count=3"]
    for name, prompt in {"null": "", "words": words, "file": str(tmp_path / "embedded.npz")}.items():
        assert main([*given, f"--prompt={prompt}", f"--out={tmp_path / name}"]) == 0
    sigma = float(run.convention.sigmas[50])
    assert "at sigma 0.22558" in capsys.readouterr().out
    x0 = jnp.asarray(
        data.load("shapes", **{**run.config.data.options, "count": 3, "shuffle": False}).take(0, 3)["image"]
    )
    encoded = {"null": run.data.text([""]), "words": rows, "file": rows}
    for name, text in encoded.items():
        (stored,) = store.read(tmp_path / name)
        cond = {key: jnp.repeat(jnp.asarray(value), 3, axis=0) for key, value in text.items() if key in run.conditions}
        expected = features.extract(run.model, params, x0, 0, sigma, cond, names, convention=run.convention)
        assert list(expected) == names
        for key in names:
            np.testing.assert_allclose(stored[key], expected[key], rtol=0, atol=1e-4)
    assert store.index(tmp_path / "words")["about"]["prompt"] == words


def test_mistaken_prompts_and_levels(run, prompted, tmp_path, capsys):
    np.savez(tmp_path / "short.npz", text=np.zeros((1, 3, 5)), text_mask=np.ones((1, 3), bool))
    np.savez(tmp_path / "none.npz", embeddings=np.zeros(3))
    plain, text = ([f"--workdir={folder[0]}", "--select=in", f"--out={tmp_path}/a.png"] for folder in (run, prompted))
    for flags, message in [
        ([*plain, "--prompt=a circle"], "text-conditioned network; dit is conditioned on label"),
        ([*text, f"--prompt={tmp_path}/short.npz"], "text has shape (3, 5), the network expects ("),
        ([*text, f"--prompt={tmp_path}/none.npz"], "has embeddings; the network also needs text"),
        ([*text, f"--prompt={tmp_path}/nowhere.npz"], "no file"),
        ([*text, "--timestep=1000"], "integer in 0..999, got 1000"),
        ([*text, "--timestep=50", "--sigma=0.3"], "--sigma or --timestep, not both"),
        ([*text, "--select=@sd1"], "no activation of"),
        ([*text, "--select=@sd7"], "no selection among sd1_legacy, sd1, "),
        ([*text, "--drop_massive=10"], "norm0"),
    ]:
        assert main(["features", "show", *flags]) == 2
        assert message in capsys.readouterr().err, flags
    assert not (tmp_path / "a.png").exists()


def test_catalog_has_the_names_of_the_reference(prompted, capsys):
    assert main(["features", "catalog", f"--workdir={prompted[0]}", "--select=up1_block0/*"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0][-1] == "reference" and len(rows) > 3
    assert {row[0]: row[-1] for row in rows}["up1_block0/out"] == "up-level0-repeat0-res-out"
    assert {row[0]: row[-1] for row in rows}["up1_block0/norm0"] == "-"


def test_massive_channels_are_dropped_from_the_norms_of_a_transformer(run, digits, tmp_path, capsys):
    workdir, model, params = run
    loud = {**params, "patches": {**params["patches"], "bias": params["patches"]["bias"].at[5].add(300.0)}}
    folder = tmp_path / "loud"
    shutil.copytree(workdir, folder)
    export.write(folder, loud)
    flags = ["--select=blocks_0/norm0", "--drop_massive=10", "--count=4", f"--out={tmp_path}/f"]
    assert main(["features", "extract", f"--workdir={folder}", *flags]) == 0
    assert "blocks_0/norm0 without channels 5\n" in capsys.readouterr().out
    (stored,) = store.read(tmp_path / "f")
    options = {"select": "blocks_0/norm0", "drop": {"blocks_0/norm0": [5]}}
    null = {"label": jnp.full(4, 10)}
    expected = features.extract(model, params, jnp.asarray(digits[0][:4]), 0, 0.2, null, **options)
    np.testing.assert_allclose(stored["blocks_0/norm0"], expected["blocks_0/norm0"], rtol=0, atol=1e-3)


def test_public_weights_give_the_features_of_the_run_they_are(run, digits, tmp_path):
    workdir, model, params = run
    weights.save(model, params, "dit", tmp_path / "dit.safetensors")
    source = [f"--config.train.init_from={tmp_path}/dit.safetensors", "--config.train.init_kind=dit"]
    for name, given in {"a": [f"--workdir={workdir}"], "b": [*CONFIG, *source]}.items():
        assert (
            main(["features", "extract", *given, "--select=blocks_0/out", "--count=8", f"--out={tmp_path}/{name}"]) == 0
        )
    (a,), (b,) = (store.read(tmp_path / name) for name in "ab")
    np.testing.assert_allclose(a["blocks_0/out"], b["blocks_0/out"], rtol=0, atol=1e-5)


def test_catalog_prints_and_writes_the_table(run, tmp_path, capsys):
    flags = ["--select=**/attention/* !**/v", f"--out={tmp_path}/table.csv"]
    assert main(["features", "catalog", *CONFIG, *flags]) == 0
    printed = capsys.readouterr().out.splitlines()
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == [f"blocks_{i}/attention/{tap}" for i in (0, 1) for tap in ("q", "k", "out")]
    assert (rows[0]["kind"], rows[0]["stage"], rows[0]["shape"], rows[0]["grid"]) == (
        "self_q",
        "blocks",
        "16x32",
        "4x4",
    )
    table = features.catalog(run[1], (1, 8, 8, 1), {"label": jnp.zeros(1, jnp.int32)})
    assert int(rows[-1]["operations"]) == table["blocks_1/attention/out"].flops
    assert printed[1].split()[:2] == ["blocks_0/attention/q", "self_q"] and printed[-1].startswith("6 of ")


def test_score_writes_a_table_and_a_heat_map(run, digits, tmp_path, capsys):
    """The probe of the input is one of noisy pixels, whatever the network."""
    out = tmp_path / "scores.csv"
    flags = ["--select=in blocks_0/attention/*", "--sigmas=0.1,2", f"--count={COUNT}", f"--out={out}"]
    assert main(["features", "score", f"--workdir={run[0]}", *flags]) == 0
    with out.open() as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["in", *(f"blocks_0/attention/{tap}" for tap in ("q", "k", "v", "out"))]
    images, labels = digits
    for sigma in (0.1, 2):
        noisy = images + sigma * features.noise(0, np.arange(COUNT), images.shape[1:])
        pooled = np.asarray(noisy).reshape(COUNT, 2, 4, 2, 4, 1).mean((2, 4))
        accuracy, _ = probes.linear_probe((pooled[::2], labels[::2]), (pooled[1::2], labels[1::2]))
        assert float(rows["in"][f"probe at sigma {sigma}"]) == pytest.approx(accuracy)
    assert out.with_suffix(".png").stat().st_size > 1000
    assert "5 activations x 2 noise levels" in capsys.readouterr().out
    assert main(["features", "score", f"--workdir={run[0]}", *flags]) == 2
    assert "scores.csv exists" in capsys.readouterr().err


def test_score_names_a_missing_matplotlib_before_it_computes(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["features", "score", f"--workdir={run[0]}", f"--out={tmp_path / 'scores.csv'}"]) == 2
    assert 'pip install "jaxdiff[plots]"' in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_noise_statistics_of_the_input_are_those_of_its_formula(run):
    """Var of sigma eps over var of the images; the noise can be read off where it is all there is."""
    _, model, params = run
    images = np.random.default_rng(0).normal(size=(40, 8, 8, 1)).astype(np.float32)
    subject = scoring.Subject(model, params, null={"label": 10})
    (measured,) = scoring.noise_in(subject, images, ["in"], 0.5).values()
    assert measured["nsr"] == pytest.approx(0.25, rel=0.1)
    assert measured["leak"] == pytest.approx(0.25 / 1.25, abs=0.05)  # R^2 of eps from x0 + eps / 2


def test_show_draws_an_image_a_row(run, tmp_path, capsys):
    out, names = tmp_path / "show.png", ("in", "blocks_0/attention/k")
    score = features.Score({"all": [1.0, 1.0]})
    features.Selection(names, score, {}, ((names, score),)).save(tmp_path / "list.json")
    flags = [f"--select=@{tmp_path}/list.json", "--count=3", f"--out={out}"]
    assert main(["features", "show", f"--workdir={run[0]}", *flags]) == 0
    assert "columns from the left: image, in, blocks_0/attention/k" in capsys.readouterr().out
    with Image.open(out) as image:
        assert image.size == (4 * (3 * 9 + 1), 4 * (3 * 9 + 1))  # 3 x 3 images of 8 pixels, enlarged 4 times


@pytest.fixture
def away(run, tmp_path):
    """The workdir of a run on a folder of images that is gone, and its model's parameters."""
    photos, workdir = tmp_path / "photos", tmp_path / "run"
    images(photos)
    config = imagenet256_dit.get_config("tiny")
    with config.unlocked():
        config.model.dtype, config.data.source = "float32", "folder"
        config.data.options = {"path": str(photos), "image_size": 8, "channels": 1}
    dataset = training.load_data(config)
    built = training.build(config, dataset)
    rng = np.random.default_rng(0)
    shapes = parameters.shapes_of(built.model, built.conditions, dataset.shape)
    params = jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32) * 0.2, shapes)
    workdir.mkdir()
    write_run(workdir, config, dataset, params)
    shutil.rmtree(photos)
    return workdir, built.model, params


def images(folder, count=6, size=(12, 16)):
    """A folder of image files, two classes of them."""
    for i in range(count):
        pixels = np.random.default_rng(i).integers(0, 256, (*size, 3), np.uint8)
        (folder / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / "ab"[i % 2] / f"{i}.png")


def test_a_run_without_its_data_is_looked_into_by_other_images(away, tmp_path, capsys):
    workdir, model, params = away
    given = [f"--workdir={workdir}", "--select=blocks_0/out"]
    assert main(["features", "catalog", f"--workdir={workdir}"]) == 0
    for command in (
        ["show", f"--out={tmp_path}/a.png"],
        ["extract", f"--out={tmp_path}/f"],
        ["score", f"--out={tmp_path}/s.csv"],
    ):
        assert main(["features", *command, *given]) == 2
        said = capsys.readouterr().err
        assert str(tmp_path / "photos") in said and "--images=FILE.npz or --images=FOLDER" in said
    images(tmp_path / "others", 4)
    pixels = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1), np.uint8)
    np.savez(tmp_path / "others.npz", images=pixels)
    others = f"--images={tmp_path}/others"
    assert main(["features", "show", *given, others, "--count=3", f"--out={tmp_path}/a.png"]) == 0
    assert (tmp_path / "a.png").is_file()
    assert main(["features", "extract", *given, f"{others}.npz", "--sigma=0.3", f"--out={tmp_path}/f"]) == 0
    (stored,) = store.read(tmp_path / "f")
    clean, null = jnp.asarray(pixels / np.float32(127.5) - 1), {"label": jnp.full(5, model.num_classes)}
    expected = features.extract(model, params, clean, 0, 0.3, null, "blocks_0/out")
    np.testing.assert_allclose(stored["blocks_0/out"], expected["blocks_0/out"], rtol=0, atol=1e-4)
    scored = ["--metric=probe", "--sigmas=0.1", "--count=4", f"--out={tmp_path}/s.csv"]
    assert main(["features", "score", *given, others, *scored]) == 0  # the folder's classes are its labels
    assert (tmp_path / "s.csv").is_file()


def test_images_of_another_shape_are_refused(run, tmp_path, capsys):
    np.savez(tmp_path / "wide.npz", images=np.zeros((2, 8, 8), np.uint8), captions=np.array(["a"]))
    np.savez(tmp_path / "none.npz", photos=np.zeros((2, 8, 8), np.uint8))
    flags = ["--select=in", f"--workdir={run[0]}", f"--out={tmp_path}/a.png"]
    assert main(["features", "show", f"--images={tmp_path}/none.npz", *flags]) == 2
    assert "'images'" in capsys.readouterr().err
    assert main(["features", "show", f"--images={tmp_path}/nowhere", *flags]) == 2
    assert str(tmp_path / "nowhere") in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()


def test_images_colour_alike_what_is_alike():
    rng = np.random.default_rng(0)
    kinds = rng.integers(0, 3, (4, 2, 2))
    centres = 3 * rng.normal(size=(3, 6))
    images = features.pca_images(centres[kinds] + 0.01 * rng.normal(size=(4, 2, 2, 6)), (4, 4))
    assert images.shape == (4, 4, 4, 3) and np.abs(images).max() <= 1
    np.testing.assert_array_equal(images[:, ::2, ::2], images[:, 1::2, 1::2])
    colours = [images[:, ::2, ::2, :2][kinds == kind] for kind in range(3)]
    assert max(np.ptp(c, axis=0).max() for c in colours) < 0.1
    assert min(np.abs(a.mean(0) - b.mean(0)).max() for a, b in itertools.pairwise(colours)) > 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shwo"], "did you mean 'show'"),
        (["show"], "--workdir=FOLDER"),
        (["show", "--workdir=/none/here", "--select=in"], "config.json"),
        (["show", *CONFIG], '--select="PATTERNS"'),
        (["show", *CONFIG, "--workdir=x"], "not both"),
        (["show", *CONFIG, "--select=blocks_0/atention/q"], "blocks_0/attention/q"),
        (["show", *CONFIG, "--select=**/map"], "blocks_0/attention/map, blocks_1/attention/map"),
        (["show", *CONFIG, "--select=in"], "--config.train.init_from=FILE"),
        (["show", *CONFIG, "--select=in", "--sigma=0"], "sigma"),
        (["show", *CONFIG, "--select=@sd1"], "Stable Diffusion's UNets and PixArt, this network has none"),
        (["score", *CONFIG, "--timesteps=1,x"], "--timesteps is a list of numbers such as 1,50,200, got '1,x'"),
        (["score", *CONFIG, "--timesteps=1", "--sigmas=2"], "--sigmas or --timesteps, not both"),
        (["show", *CONFIG, "--select=in", "--out=a.jpg"], ".png, got 'a.jpg'"),
        (["show", *CONFIG, "--select=in", "--images=gs://bucket/x"], "--images=gs://bucket/x"),
        (["extract", *CONFIG, "--select=in"], "--out=FOLDER, got ''"),
        (["extract", *CONFIG, "--select=in", "--out=f", "--dtype=int8"], "dtype 'int8'"),
        (["score", *CONFIG, "--metric=nrs"], "did you mean 'nsr'"),
        (["score", *CONFIG, "--sigmas=0.1;2"], "got '0.1;2'"),
    ],
)  # fmt: skip
def test_mistakes_get_one_readable_line_and_nothing_is_written(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["features", *arguments]) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())
