"""`jaxdiff features`: what its commands write, from a run and from public weights, and what they say of mistakes."""

import csv
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from jaxdiff import data, features, training, weights
from jaxdiff.cli import main
from jaxdiff.configs import imagenet256_dit
from jaxdiff.features import probes, scoring, store
from jaxdiff.training import export
from jaxdiff.training.trainer import declare

CONFIG = ["--config=imagenet256_dit:tiny", "--config.model.dtype=float32"]
COUNT = 20


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run whose parameters are random, its model and parameters. The blocks are scanned."""
    workdir, config = tmp_path_factory.mktemp("run"), imagenet256_dit.get_config("tiny")
    config.model.dtype = "float32"
    job = training.build(config)
    exported = jax.eval_shape(job.method.export, declare(job)[0])
    rng = np.random.default_rng(0)
    draw = lambda s: jnp.asarray(rng.normal(size=s.shape) * 0.2, jnp.float32)  # noqa: E731
    state = exported.replace(step=jnp.int32(4), ema=jax.tree.map(draw, exported.ema))
    export.write_config(workdir, config)
    export.write(workdir, state)
    return workdir, job.model, state.ema


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
    assert "scores.csv exists; remove it" in capsys.readouterr().err


def test_noise_statistics_of_the_input_are_those_of_its_formula(run):
    """Var of sigma eps over var of the images; the noise can be read off where it is all there is."""
    _, model, params = run
    images = np.random.default_rng(0).normal(size=(40, 8, 8, 1)).astype(np.float32)
    subject = scoring.Subject(model, params, null={"label": 10})
    (measured,) = scoring.noise_in(subject, images, ["in"], 0.5).values()
    assert measured["nsr"] == pytest.approx(0.25 / (1 + 0.25 / 4), rel=0.1)
    assert measured["leak"] == pytest.approx(0.25 / 1.25, abs=0.05)  # R^2 of eps from x0 + eps / 2


def test_show_draws_an_image_a_row(run, tmp_path, capsys):
    out, names = tmp_path / "show.png", ("in", "blocks_0/attention/k")
    score = features.Score({"all": [1.0, 1.0]})
    features.Selection(names, score, {}, ((names, score),)).save(tmp_path / "list.json")
    flags = [f"--select=@{tmp_path}/list.json", "--count=3", f"--out={out}"]
    assert main(["features", "show", f"--workdir={run[0]}", *flags]) == 0
    assert "columns from the left: image, in, blocks_0/attention/k" in capsys.readouterr().out
    with Image.open(out) as picture:
        assert picture.size == (4 * (3 * 9 + 1), 4 * (3 * 9 + 1))  # 3 x 3 pictures of 8 pixels, enlarged 4 times


def test_pictures_colour_alike_what_is_alike():
    rng = np.random.default_rng(0)
    kinds = rng.integers(0, 3, (4, 2, 2))
    centres = 3 * rng.normal(size=(3, 6))
    pictures = features.pca_pictures(centres[kinds] + 0.01 * rng.normal(size=(4, 2, 2, 6)), (4, 4))
    assert pictures.shape == (4, 4, 4, 3) and np.abs(pictures).max() <= 1
    np.testing.assert_array_equal(pictures[:, ::2, ::2], pictures[:, 1::2, 1::2])
    colours = [pictures[:, ::2, ::2, :2][kinds == kind] for kind in range(3)]
    assert max(np.ptp(c, axis=0).max() for c in colours) < 0.1
    assert min(np.abs(a.mean(0) - b.mean(0)).max() for a, b in itertools.pairwise(colours)) > 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shwo"], "features needs one of catalog, extract, score, show, got 'shwo' (did you mean 'show'?)"),
        (["show"], "give --workdir=FOLDER"),
        (["show", "--workdir=/none/here", "--select=in"], "there is no config.json"),
        (["show", *CONFIG], 'give --select="PATTERNS"'),
        (["show", *CONFIG, "--workdir=x"], "a run or --config=FILE, not both"),
        (["show", *CONFIG, "--select=blocks_0/atention/q"], "near it are blocks_0/attention/q"),
        (["show", *CONFIG, "--select=**/map"], "none of blocks_0/attention/map, blocks_1/attention/map lies over the image"),
        (["show", *CONFIG, "--select=in"], "--config.train.init_from=FILE of public weights"),
        (["show", *CONFIG, "--select=in", "--sigma=0"], "sigma must be positive"),
        (["show", *CONFIG, "--select=in", "--out=a.jpg"], "--out must end in .png, got 'a.jpg'"),
        (["extract", *CONFIG, "--select=in"], "a new or empty folder, --out=FOLDER, got ''"),
        (["extract", *CONFIG, "--select=in", "--out=f", "--dtype=int8"], "unknown dtype 'int8'"),
        (["score", *CONFIG, "--metric=nrs"], "unknown metric 'nrs' (did you mean 'nsr'?)"),
        (["score", *CONFIG, "--sigmas=0.1;2"], "--sigmas is a list of noise levels such as 0.1,0.2, got '0.1;2'"),
    ],
)  # fmt: skip
def test_mistakes_get_one_readable_line_and_nothing_is_written(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["features", *arguments]) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())
