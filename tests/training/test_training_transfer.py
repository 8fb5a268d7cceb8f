"""Starting from the parameters of another run: what is copied, resampled, new and refused; curricula."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_runs import POINTS, config_of

from jaxdiff import models, training
from jaxdiff.models.mdt import relative_index
from jaxdiff.training import trainer, transfer
from jaxdiff.training.curriculum import stages
from jaxdiff.training.export import read_arrays, read_config
from jaxdiff.trees import by_name

ONE = jax.devices()[:1]
SIZE = {"patch": 2, "depth": 2, "width": 16, "heads": 2, "channels": 1}


def shapes(name, side=8, cond=None, **fields):
    model = models.build(name, **{**SIZE, **fields})
    return jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, side, side, 1)), 1.0, cond)["params"])


def filled(tree):
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=leaf.shape).astype(np.float32) for name, leaf in by_name(tree).items()}


def text(width):
    return {"text": jnp.zeros((1, 2, width))}


@pytest.mark.parametrize(
    ("name", "old", "new", "renewed"),
    [
        ("dit", {"num_classes": 3}, {"num_classes": 5}, {"label"}),
        ("dit", {"num_classes": 3}, {"num_classes": 0}, set()),
        ("mmdit", {"text_dim": 4, "pooled_dim": 0, "cond": text(4)}, {"text_dim": 6, "pooled_dim": 0, "cond": text(6)}, {"text"}),
        ("pixart", {"text_dim": 4, "cond": text(4)}, {"text_dim": 6, "cond": text(6)}, {"text_mlp/in"}),
    ],
)  # fmt: skip
def test_only_layers_of_conditions_are_new(name, old, new, renewed):
    found, wanted = filled(shapes(name, **old)), shapes(name, **new)
    kept = transfer.fit(found, wanted, "a run")
    assert {key.rsplit("/", 1)[0] for key in set(by_name(wanted)) - set(kept)} == renewed
    assert all(kept[key] is found[key] for key in kept)
    told = transfer.report(kept, wanted)
    assert told == f"{len(kept)} arrays copied, " + (f"new: {', '.join(renewed)}" if renewed else "nothing is new")


@pytest.mark.parametrize("change", [{"width": 32}, {"depth": 3}, {"patch": 4}, {"scan": True}])
def test_another_network_is_refused_with_what_to_do(change):
    found = filled(shapes("dit", num_classes=3))
    wrong = r"runs/a belongs to another model: \d+ mismatches \(.*model.fields"
    with pytest.raises(ValueError, match=wrong):
        transfer.fit(found, shapes("dit", num_classes=3, **change), "runs/a")


def test_a_side_that_the_patch_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"DiT needs height and width divisible by 2, got 9x9"):
        shapes("dit", side=9)


# ------------------------------------------------------------------------------------------ tables of positions


@pytest.mark.parametrize("scan", [False, True])
def test_tables_of_an_mdt_go_to_the_finer_grid(scan):
    fields = {"num_classes": 2, "depth": 4, "decoder": 2, "scan": scan}
    found, wanted = filled(shapes("mdt", 8, **fields)), shapes("mdt", 16, **fields)
    kept = transfer.fit(found, wanted, "a run")
    assert set(kept) == set(by_name(wanted))
    np.testing.assert_array_equal(kept["positions"][::2, ::2], found["positions"])
    middle = (found["decoder_positions"][1, 2] + found["decoder_positions"][2, 2]) / 2
    np.testing.assert_allclose(kept["decoder_positions"][3, 4], middle, rtol=1e-5)
    biases = [name for name in found if name.endswith("position_bias")]
    assert len(biases) == (4 if scan else 5)
    coarse, fine = relative_index(4, 4), relative_index(8, 8)
    for name in biases:  # tokens two apart on the fine grid stand as far apart as neighbours on the coarse one
        for a, b in itertools.product(range(16), repeat=2):
            (ya, xa), (yb, xb) = divmod(a, 4), divmod(b, 4)
            offset = fine[16 * ya + 2 * xa, 16 * yb + 2 * xb]
            np.testing.assert_allclose(kept[name][..., offset, :], found[name][..., coarse[a, b], :], rtol=1e-6)
        np.testing.assert_array_equal(kept[name][..., -3:, :], found[name][..., -3:, :])


def test_resampling_keeps_what_is_linear_and_goes_back():
    table = np.arange(4.0)[:, None, None] + 10 * np.arange(6.0)[:, None] + np.zeros(2)
    fine = transfer.resample_positions(table, (8, 12))
    np.testing.assert_allclose(fine[:7, 0, 0], np.arange(7) / 2)
    np.testing.assert_array_equal(fine[7], fine[6])  # nothing is known beyond the last old token
    np.testing.assert_allclose(transfer.resample_positions(fine, (4, 6)), table)
    bias = np.random.default_rng(0).normal(size=(7 * 11 + 3, 2))
    there = transfer.resample_bias(bias, (4, 6), (8, 12))
    assert there.shape == (15 * 23 + 3, 2)
    np.testing.assert_allclose(transfer.resample_bias(there, (8, 12), (4, 6)), bias)


# ------------------------------------------------------------------------------------------ runs


def test_a_run_with_other_classes_starts_from_the_rest(tmp_path, capsys):
    base = {**POINTS, "train.steps": 1}
    trainer.train(config_of(base, {"data.options.preset": "ring"}), tmp_path / "a", devices=ONE)
    capsys.readouterr()
    changes = {"train.init_from": str(tmp_path / "a"), "optim.learning_rate": 0.0}
    state = trainer.train(config_of(base, changes), tmp_path / "b", devices=ONE).state
    assert f"starting from the parameters of {tmp_path / 'a'}: " in (out := capsys.readouterr().out)
    assert "arrays copied, new: label\n" in out
    before, after = read_arrays(tmp_path / "a"), by_name(jax.device_get(state.params["student"]))
    assert before["label/embedding"].shape == (9, 16) and after["label/embedding"].shape == (26, 16)
    for name in set(after) - {"label/embedding"}:
        np.testing.assert_array_equal(before[name], after[name])


CURRICULUM = {
    "stage1": {"data": {"options": {"preset": "ring"}}, "train": {"steps": 2}},
    "stage2": {"noise": {"shift": 2.0}, "optim": {"learning_rate": 0.0}, "train": {"steps": 1}},
}


def test_a_curriculum_trains_its_stages_one_from_the_other(tmp_path, capsys):
    config = config_of(POINTS, {"curriculum": CURRICULUM})
    result = trainer.train(config, tmp_path, devices=ONE)
    assert result.step == 1 and not result.stopped
    before, after = read_arrays(tmp_path / "stage1"), by_name(jax.device_get(result.state.params["student"]))
    np.testing.assert_array_equal(before["in/kernel"], after["in/kernel"])
    made = read_config(tmp_path / "stage2")
    assert (made.noise.shift, made.train.init_from, made.data.options.get("preset")) == (
        2.0,
        str(tmp_path / "stage1"),
        None,
    )
    assert not made.curriculum
    assert capsys.readouterr().out.count("starting") == 2
    trainer.train(config, tmp_path, devices=ONE)
    out = capsys.readouterr().out
    assert "starting" not in out and out.count("resuming") == 1  # stage1 is not touched again
    assert read_config(tmp_path).curriculum.to_dict() == CURRICULUM  # resumes without the config file


def test_stages_are_checked_before_the_first_begins(tmp_path):
    with pytest.raises(ValueError, match=r"unknown key in curriculum.a.train 'stepz' \(did you mean 'steps'\?\)"):
        stages(config_of(POINTS, {"curriculum": {"a": {"train": {"stepz": 1}}}}))
    wrong = {**CURRICULUM, "stage3": {"noise": {"sigma_sampler": "lognorm"}}}
    with pytest.raises(ValueError, match="unknown noise levels 'lognorm'"):
        training.train(config_of(POINTS, {"curriculum": wrong}), tmp_path, devices=ONE)
    assert not list(tmp_path.iterdir())
