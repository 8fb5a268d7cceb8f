"""Latents as data: stored with their units, trained on as they are, decoded when sampled."""

import jax
import numpy as np
import pytest

from jaxdiff import data, latents, models, training, weights
from jaxdiff.configs import default
from jaxdiff.training.evaluate import sample

SMALL = models.TAESD(channels=4, width=8, blocks=(1, 1))


@pytest.fixture(scope="module")
def autoencoder(tmp_path_factory):
    """A small TAESD with random weights, its file, and 5 latents in another."""
    folder = tmp_path_factory.mktemp("latents")
    params = jax.jit(SMALL.init)(jax.random.key(0), np.zeros((1, 8, 8, 3), np.float32))["params"]
    weights.save(SMALL, params, "taesd", folder / "taesd.npz")
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), np.uint8)
    z = latents.encode(SMALL, params, images, batch_size=5)
    latents.write(folder / "z.npz", 3 * z, SMALL, labels=np.arange(5) % 2, class_names=["a", "b"])
    return folder, params, 3 * z


def test_latents_reach_the_model_as_they_are(autoencoder):
    folder, _, z = autoencoder
    made = data.load("latents", path=folder / "z.npz", shuffle=False)
    batch = made.take(0, 5)
    np.testing.assert_array_equal(batch["image"], z)
    np.testing.assert_array_equal(batch["label"], [0, 1, 0, 1, 0])
    assert made.latent == {"scale": 1.0, "shift": 0.0} and made.class_names == ("a", "b")
    assert data.load("digits").latent is None


def test_units_are_those_of_the_autoencoder(tmp_path):
    model = models.AutoencoderKL(**models.vae.SIZES["sd3"])
    latents.write(tmp_path / "z.npz", np.full((2, 4, 4, 16), 7.0), model)
    assert data.load("latents", path=tmp_path / "z.npz").latent == {"scale": 1.5305, "shift": 0.0609}
    with pytest.raises(ValueError, match="unknown column of latents 'label'"):
        latents.write(tmp_path / "z.npz", np.zeros((2, 4, 4, 16)), model, label=[1, 2])


def test_records_of_latents_are_marked(tmp_path):
    z = 5 * np.random.default_rng(0).normal(size=(3, 4, 4, 4)).astype(np.float32)
    units = {"scale": 0.18215, "shift": 0.0}
    data.write_array_records(tmp_path / "z.array_record", [{"image": each} for each in z], latent=units)
    made = data.load("array_records", path=tmp_path, shuffle=False)
    assert made.latent == units
    np.testing.assert_array_equal(made.take(0, 3)["image"], z)
    with pytest.raises(ValueError, match="holds latents, which cannot be cut or mirrored"):
        data.load("array_records", path=tmp_path, flip=True)


@pytest.mark.parametrize(
    "options", [{"flip": True}, {"image_size": 2, "crop": "local"}, {"control": ("flip",)}, {"channels": 3}]
)
def test_latents_are_not_cut_or_mirrored(autoencoder, options):
    with pytest.raises(
        ValueError, match=r"holds latents, which cannot be cut or mirrored: .* encode the mirror images"
    ):
        data.load("latents", path=autoencoder[0] / "z.npz", **options)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": np.zeros((2, 4, 4, 4))}, r"has keys images, but latents, scale, shift are needed"),
        ({"latents": np.zeros((2, 4, 4)), "scale": 1, "shift": 0}, r"finite floats \[n k l z\], got float64 of shape"),
        ({"latents": np.full((2, 4, 4, 4), np.nan), "scale": 1, "shift": 0}, r"must be finite floats"),
    ],
)
def test_files_that_hold_no_latents(tmp_path, arrays, message):
    np.savez(tmp_path / "z.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        data.load("latents", path=tmp_path / "z.npz")
    with pytest.raises(FileNotFoundError, match=r"no latents at .*jaxdiff.latents.write makes them"):
        data.load("latents", path=tmp_path / "none.npz")


# ------------------------------------------------------------------------------------------ in a run


def config_of(folder, **changes):
    c = default.get_config()
    c.data.source, c.data.options.path, c.data.batch_size = "latents", str(folder / "z.npz"), 8
    c.model.name = "dit"
    c.model.fields.update(patch=2, depth=1, width=16, heads=2)
    c.autoencoder.kind, c.autoencoder.path = "taesd", str(folder / "taesd.npz")
    c.eval.net = ""
    c.update_from_flattened_dict(changes)
    return c


def test_samples_are_decoded(autoencoder):
    folder, params, z = autoencoder
    job = training.build(config_of(folder), jax.devices()[:1])
    assert job.model.channels == 4 and job.dataset.image_shape == (4, 4, 4)
    run = lambda state, seed, index: (z[index % 5], index)  # noqa: E731
    ((images, _),) = sample(job, None, 3, 0, run=run)
    np.testing.assert_allclose(images, latents.decode(SMALL, params, z[:3]), atol=1e-6)
    ((plain, _),) = sample(job, None, 3, 0, run=run, decode=False)
    np.testing.assert_array_equal(plain, z[:3])


def test_wrong_autoencoders(autoencoder, tmp_path):
    folder, _, z = autoencoder
    with pytest.raises(ValueError, match="unknown autoencoder kind 'vae'"):
        training.build(config_of(folder, **{"autoencoder.kind": "vae"}))
    with pytest.raises(FileNotFoundError, match=r"no weights of an autoencoder at 'none': give --config.autoencoder.p"):
        training.build(config_of(folder, **{"autoencoder.path": "none"}))
    np.savez(tmp_path / "z.npz", latents=z, scale=2.0, shift=0.0)
    job = training.build(config_of(folder, **{"data.options.path": str(tmp_path / "z.npz")}), jax.devices()[:1])
    with pytest.raises(
        ValueError, match=r"is not the autoencoder that made latents/z: it decodes 4 channels with .*1.0"
    ):
        job.decode(z)
