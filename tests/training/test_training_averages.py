"""Stored averages, averages of other widths combined from them, and autoguidance between them."""

import json
import shutil

import jax
import numpy as np
import pytest

import jaxdiff
from jaxdiff import cli, denoisers, training
from jaxdiff.configs import mixture2d
from jaxdiff.training import snapshots
from jaxdiff.weights import files

STEPS, EVERY = 640, 16
TRACKED, BETWEEN = (0.05, 0.1), (0.06, 0.075, 0.09)


def config_of(**changes):
    config = mixture2d.get_config("tiny")
    with config.unlocked():
        config.train.steps, config.train.save_every, config.train.eval_every = STEPS, STEPS // 2, 0
        config.train.log_every = STEPS
        config.optim.decay = "constant"
        config.ema.kind, config.ema.options = "power", {"sigma_rel": 0.05}
        config.ema.widths, config.ema.snapshot_every = TRACKED, EVERY
        config.update_from_flattened_dict(changes)
    return config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that stores two widths; the others are tracked as well, to compare with."""
    workdir = tmp_path_factory.mktemp("run")
    result = training.train(config_of(**{"ema.widths": (*TRACKED, *BETWEEN)}), workdir, quiet=True)
    for path in snapshots.stored(workdir).values():  # as a run with `TRACKED` alone would have stored
        kept = {name: a for name, a in files.read(path).items() if float(name.split("/")[0]) in TRACKED}
        files.write(path, kept)
    return workdir, result.state


def distance(arrays, tree):
    """|a - b| / |b| over all parameters."""
    pairs = [(arrays[name], np.asarray(leaf)) for name, leaf in jaxdiff.trees.by_name(tree).items()]
    return np.sqrt(sum(np.square(a - b).sum() for a, b in pairs) / sum(np.square(b).sum() for _, b in pairs))


def test_combined_averages_are_those_that_were_tracked(run):
    workdir, state = run
    combined = snapshots.combine(workdir, (*TRACKED, *BETWEEN))
    assert set(state.averages) == {"ema", "width_0.1", *(f"width_{w:g}" for w in BETWEEN)}
    for width, arrays in combined.items():
        tracked = state.averages["ema" if width == 0.05 else f"width_{width:g}"]
        assert distance(arrays, tracked) < (1e-6 if width in TRACKED else 1e-4)
        assert distance(arrays, state.params["student"]) > 1e-3  # they do differ
    assert distance(combined[0.06], state.averages["width_0.09"]) > 1e-3


def test_averages_of_an_earlier_step(run):
    workdir, _ = run
    half = STEPS // 2
    earlier = snapshots.combine(workdir, [0.1], half)[0.1]
    stored = files.read(snapshots.stored(workdir)[half])
    for name, array in earlier.items():
        np.testing.assert_allclose(array, stored[f"0.1/{name}"], atol=1e-6)
    with pytest.raises(ValueError, match="no averages are stored for step 7"):
        snapshots.combine(workdir, [0.1], 7)


def test_a_resumed_run_stores_the_same(tmp_path):
    config = config_of(**{"train.steps": 8, "train.save_every": 4, "ema.snapshot_every": 3})
    training.train(config, tmp_path, quiet=True)
    assert [*snapshots.stored(tmp_path)] == [3, 6, 8]
    before = {step: path.read_bytes() for step, path in snapshots.stored(tmp_path).items()}
    shutil.rmtree(tmp_path / "checkpoints/8")
    snapshots.write(tmp_path, 7, {0.05: {"a": np.ones(1)}})  # of a run that was stopped after its checkpoint
    training.train(config, tmp_path, quiet=True)
    assert {step: path.read_bytes() for step, path in snapshots.stored(tmp_path).items()} == before


def test_command_and_sweep(run, capsys):
    workdir, state = run
    assert cli.main(["ema", f"--workdir={workdir}", "--widths=0.06,0.1", "--evaluate", "--config.eval.samples=64"]) == 0
    out = capsys.readouterr().out
    assert f"width 0.06: wrote {workdir / 'averages/ema_0.06.safetensors'}" in out
    assert "width 0.0600, sliced_wasserstein" in out and "width 0.1000, sliced_wasserstein" in out
    records = [json.loads(line) for line in (workdir / "evaluations.jsonl").read_text().splitlines()]
    assert [record["width"] for record in records] == [0.06, 0.1]
    config = config_of(**{"sample.average": 0.1})
    loaded = jaxdiff.load(workdir, config).params
    np.testing.assert_allclose(distance(jaxdiff.trees.by_name(loaded), state.averages["width_0.1"]), 0, atol=1e-6)
    config.sample.average = 0.2
    with pytest.raises(FileNotFoundError, match=r"no average of width 0.2.*jaxdiff ema --workdir=.*--widths=0.2"):
        _ = jaxdiff.load(workdir, config).params
    assert cli.main(["ema", f"--workdir={workdir}", "--widths=0.1,x"]) == 2
    assert "--widths takes different relative widths" in capsys.readouterr().err


def test_autoguidance_between_averages_and_sizes(run, tmp_path):
    """The samples are those of a solver run on the closed form of the guided denoiser."""
    workdir, _ = run
    training.train(config_of(**{"train.steps": 8, "model.fields.width": 8}), tmp_path, quiet=True)
    files.write(snapshots.combined_path(workdir, 0.09), snapshots.combine(workdir, [0.09])[0.09])
    plain = jaxdiff.load(workdir)
    for weak in (tmp_path, snapshots.combined_path(workdir, 0.09)):
        saved = jaxdiff.load(workdir, config_of(**{"sample.guidance": 1.5, "sample.weak": str(weak)}))
        assert saved.run.nfe == 2 * plain.run.nfe
        x, sigma = jax.random.normal(jax.random.key(0), (5, 2)), 0.7
        other = jaxdiff.load(tmp_path) if weak == tmp_path else plain
        params = other.params if weak == tmp_path else saved.weak.params
        poor = other.run.method.denoiser(params)(x, sigma)
        wanted = poor + 1.5 * (plain.denoiser(x, sigma) - poor)
        np.testing.assert_allclose(saved.denoiser(x, sigma), wanted, atol=1e-5)
        assert saved.sample(0, 6).shape == (6, 2)
    assert denoisers.guided(plain.denoiser, 1.5, weak=plain.denoiser)(x, sigma).shape == x.shape


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ema.snapshot_every": 0}, r"ema.widths=\(0.05, 0.1\) are stored every ema.snapshot_every=0"),
        ({"ema.widths": (0.1, 0.1)}, "different relative widths"),
        ({"ema.widths": (0.1, 0.5)}, r"must be in \(0, 0.2886\], got 0.5"),
    ],
)
def test_mistakes_in_the_config(changes, message):
    config = config_of(**changes)
    with pytest.raises(ValueError, match=message):
        training.build(config, training.load_data(config))


def test_mistakes_in_guidance(run, tmp_path):
    workdir, _ = run
    with pytest.raises(FileNotFoundError, match="no weaker network"):
        jaxdiff.load(workdir, config_of(**{"sample.guidance": 2.0, "sample.weak": str(tmp_path / "none")}))
    with pytest.raises(ValueError, match=r"no effect with sample.guidance=1"):
        jaxdiff.load(workdir, config_of(**{"sample.weak": str(workdir)}))
    with pytest.raises(FileNotFoundError, match=r"train with --config.ema.widths"):
        snapshots.combine(tmp_path, [0.1])
