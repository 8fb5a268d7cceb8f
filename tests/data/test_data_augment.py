"""EDM's augmentation: published values, closed forms, and training with it."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import GOLDEN

from jaxdiff import data, training
from jaxdiff.configs import cifar10
from jaxdiff.data import augment
from jaxdiff.training import load_data
from jaxdiff.training.build import build, reference_data

NONE = {name: np.zeros((2, 2) if name == "translation" else 2, np.float32) for name in augment.NAMES}


def images(height=16, width=16, n=2):
    """Smooth images, so that interpolation is exact enough."""
    y, x = np.mgrid[:height, :width]
    waves = [0.5 * np.sin(0.3 * (i + 1) * x + 0.2 * y) * np.cos(0.25 * y) for i in range(n)]
    return np.stack(waves)[..., None].astype(np.float32)


def changed(**parameters):
    return {**NONE, **{name: np.asarray(value, np.float32) for name, value in parameters.items()}}


def recorded():
    """The draws of the published implementation, as the amounts and uniforms of `keep`."""
    with np.load(GOLDEN / "edm_augment.npz") as file:
        z = dict(file)
    draws = [z[name] for name in sorted(z) if name.startswith("draw/")]
    n = len(z["in/images"])
    draws = [d.T if d.shape == (2, n) else d.reshape(n) for d in draws]
    x, ux, y, uy, scale, us, turn, ut, aniso, angle, ua, uangle, move, um = draws
    turn, angle = ((2 * value - 1) * np.pi for value in (turn, angle))
    amounts = dict(zip(augment.NAMES, (x, y, scale, turn, aniso, angle, move), strict=True))
    uniforms = dict(zip(augment.NAMES, (ux, uy, us, ut, ua, uangle, um), strict=True))
    return z, augment.keep(amounts, uniforms, float(z["p"]))


def test_it_is_the_published_one():
    z, parameters = recorded()
    found, labels = jax.jit(augment.apply)(z["in/images"] / np.float32(127.5) - 1, parameters)
    np.testing.assert_allclose(found, z["out/images"], atol=1e-4)
    np.testing.assert_allclose(labels, z["out/labels"], atol=1e-6)


def test_without_transformation_an_image_is_returned():
    """The filter is orthogonal; images need not be square, and the size of a batch does not matter."""
    x = images(12, 20)
    found, labels = augment.apply(x, NONE)
    np.testing.assert_allclose(found, x, atol=2e-6)
    assert not np.asarray(labels).any()


@pytest.mark.parametrize(("name", "axis"), [("flip_x", 2), ("flip_y", 1)])
def test_flips_are_exact_mirror_images(name, axis):
    x = images(12, 20)
    found, _ = augment.apply(x, changed(**{name: [0, 1]}))
    np.testing.assert_allclose(found[0], x[0], atol=2e-6)
    np.testing.assert_allclose(found[1], np.flip(x, axis)[1], atol=2e-6)


def test_translation_by_whole_pixels():
    """A unit is an eighth of the side; what moves in is the reflection."""
    x = images(16, 24)
    found, _ = augment.apply(x, changed(translation=[[1, 0], [0, -1.5]]))
    np.testing.assert_allclose(found[0, :, 3:], x[0, :, :-3], atol=2e-6)
    np.testing.assert_allclose(found[0, :, :3], x[0, :, 3:0:-1], atol=2e-6)
    np.testing.assert_allclose(found[1, :-3], x[1, 3:], atol=2e-6)


def test_rotation_and_scale_of_a_smooth_image():
    """A half turn mirrors both axes; scale and anisotropy resample a linear ramp to a ramp of another slope."""
    x = images(16, 16)
    found, _ = augment.apply(x, changed(rotation=[np.pi, np.pi]))
    np.testing.assert_allclose(found, x[:, ::-1, ::-1], atol=5e-2)  # the filter is not symmetric
    ramp = np.broadcast_to(np.linspace(-0.5, 0.5, 16, dtype=np.float32)[None, None, :, None], (2, 16, 16, 1))
    found, _ = augment.apply(ramp, changed(scale=[5, 0], anisotropy=[0, 5]))
    middle = np.asarray(found)[:, 6:10, 5:11, 0]
    np.testing.assert_allclose(np.diff(middle, axis=2), 1 / 15 / 2, atol=2e-3)  # half of the slope: twice as large


def test_parameters_that_are_left_out_are_zero():
    x, drawn = images(12, 16), augment.draw(jax.random.key(3), 2, 1.0)
    some = {name: drawn[name] for name in ("anisotropy_angle", "scale", "anisotropy")}  # in any order
    found, labels = augment.apply(x, some)
    whole, all_labels = augment.apply(x, {**NONE, **some})
    np.testing.assert_array_equal(found, whole)
    np.testing.assert_array_equal(labels, all_labels)
    assert np.abs(found - x).max() > 0.01 and np.count_nonzero(labels) == 6


def test_draws_have_their_distributions():
    n, p = 4000, 0.25
    drawn = {name: np.asarray(value) for name, value in augment.draw(jax.random.key(0), n, p).items()}
    assert abs(drawn["flip_x"].mean() - 0.5) < 0.04 and abs(drawn["flip_y"].mean() - p / 2) < 0.04
    for name in ("scale", "rotation", "anisotropy", "anisotropy_angle"):
        used = drawn[name][drawn[name] != 0]
        spread = 1.0 if name in ("scale", "anisotropy") else np.pi / np.sqrt(3)
        assert abs(len(used) / n - p) < 0.04 and abs(used.std() / spread - 1) < 0.1 and abs(used.mean()) < 0.2
    moved = (drawn["translation"] != 0).all(1)
    assert abs(moved.mean() - p) < 0.04 and not drawn["translation"][~moved].any()
    assert not np.asarray(augment.labels_of(augment.draw(jax.random.key(0), 9, 0.0))).any()


def test_batches_depend_on_seed_and_position_alone():
    sets = [data.load("digits", augment=0.5, seed=seed) for seed in (0, 0, 1)]
    one, again, other = (d.batch(3, 8) for d in sets)
    for name in one:
        np.testing.assert_array_equal(one[name], again[name])
    assert (one["augment"] != other["augment"]).any() and one["augment"].shape == (8, 9)
    halves = [sets[0].batch(3, 8, i, 2) for i in range(2)]  # two processes
    np.testing.assert_array_equal(np.concatenate([half["augment"] for half in halves]), one["augment"])
    joined = np.concatenate([half["image"] for half in halves])
    np.testing.assert_allclose(joined, one["image"], atol=1e-6)
    plain = data.load("digits").batch(3, 8)
    same = ~one["augment"].any(1)
    np.testing.assert_allclose(one["image"][same], plain["image"][same], atol=1e-5)


def test_evaluation_and_sampling_are_not_augmented():
    config = cifar10.get_config("tiny")
    run = build(config, load_data(config))
    assert run.model.augment_dim == 9 and run.conditions["augment"].shape == (9,)
    np.testing.assert_array_equal(run.control["augment"], np.zeros(9))
    assert "augment" not in reference_data(config).batch(0, 2)


def test_training_resumes_to_the_same_bits(tmp_path):
    config = cifar10.get_config("tiny")
    config.train.steps = 4
    config.train.save_every, config.sample.count = 2, 0
    config.model.fields.update(channel_mult=(1,), attention=())
    straight = training.train(config, tmp_path, quiet=True).state
    shutil.rmtree(tmp_path / "checkpoints/4")
    resumed = training.train(config, tmp_path, quiet=True).state
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), straight, resumed)))


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: data.load("digits", augment=1.5), r"in \[0, 1\], got 1.5"),
        (lambda: data.load("mixture", augment=0.1), "points of shape .* cannot be augmented"),
        (lambda: augment.apply(images(), {"scales": np.zeros(2)}), "'scales' .did you mean 'scale'"),
        (lambda: augment.apply(images(), {"translation": np.zeros(2)}), r"translation \[n 2\]; got .*\(2,\)"),
        (lambda: augment.apply(images(n=3), NONE), r"3 images takes parameters \[n\]"),
        (lambda: augment.apply(images()[0], {}), r"images \[n h w c\]"),
    ],
)
def test_mistakes(action, message):
    with pytest.raises(ValueError, match=message):
        action()


def test_a_network_that_would_not_see_the_augmentation_is_rejected():
    config = cifar10.get_config("tiny")
    config.model.fields.augment_dim = 0
    with pytest.raises(ValueError, match=r"augmented, but this unet is not conditioned.*data.options.augment=0"):
        build(config, load_data(config))
