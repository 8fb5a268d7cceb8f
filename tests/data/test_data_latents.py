"""Latents as data: stored with their units, trained on as they are, decoded when sampled."""

import jax
import numpy as np
import pytest

from jaxdiff import autoencoders, data, models, training, weights
from jaxdiff.configs import default

SMALL = models.TAESD(channels=4, width=8, blocks=(1, 1))


@pytest.fixture(scope="module")
def autoencoder(tmp_path_factory):
    """A small TAESD with random weights, its file, and 5 latents in another."""
    folder = tmp_path_factory.mktemp("latents")
    params = jax.jit(SMALL.init)(jax.random.key(0), np.zeros((1, 8, 8, 3), np.float32))["params"]
    weights.save(SMALL, params, "taesd", folder / "taesd.npz")
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), np.uint8)
    z = autoencoders.encode(SMALL, params, images, batch_size=5)
    autoencoders.write(folder / "z.npz", 3 * z, SMALL, labels=np.arange(5) % 2, class_names=["a", "b"])
    return folder, params, 3 * z


def test_latents_reach_the_model_as_they_are(autoencoder):
    folder, _, z = autoencoder
    made = data.load("latents", path=folder / "z.npz", shuffle=False)
    batch = made.take(0, 5)
    np.testing.assert_array_equal(batch["image"], z)
    np.testing.assert_array_equal(batch["label"], [0, 1, 0, 1, 0])
    assert made.latent == (1.0, 0.0) and made.class_names == ("a", "b")
    assert data.load("digits").latent is None


def test_units_are_those_of_the_autoencoder(tmp_path):
    model = models.AutoencoderKL(**models.vae.SIZES["sd3"])
    autoencoders.write(tmp_path / "z.npz", np.full((2, 4, 4, 16), 7.0), model)
    assert data.load("latents", path=tmp_path / "z.npz").latent == (1.5305, 0.0609)
    with pytest.raises(ValueError, match=r"'label'.*did you mean 'labels'"):
        autoencoders.write(tmp_path / "z.npz", np.zeros((2, 4, 4, 16)), model, label=[1, 2])


def test_records_of_latents_are_marked(tmp_path):
    z = 5 * np.random.default_rng(0).normal(size=(3, 4, 4, 4)).astype(np.float32)
    units = (0.18215, 0.0)
    data.write_array_records(tmp_path / "z.array_record", [{"image": each} for each in z], latent=units)
    made = data.load("array_records", path=tmp_path, shuffle=False)
    assert made.latent == units
    np.testing.assert_array_equal(made.take(0, 3)["image"], z)
    with pytest.raises(ValueError, match=r"array_records.*latents.*flip"):
        data.load("array_records", path=tmp_path, flip=True)


@pytest.mark.parametrize(
    "options", [{"flip": True}, {"image_size": 2, "crop": "local"}, {"control": ("flip",)}, {"channels": 3}]
)
def test_latents_are_not_cut_or_mirrored(autoencoder, options):
    with pytest.raises(ValueError, match=r"latents/z.*image_size, crop, flip, channels and control"):
        data.load("latents", path=autoencoder[0] / "z.npz", **options)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": np.zeros((2, 4, 4, 4))}, r"images.*latents, scale, shift"),
        ({"latents": np.zeros((2, 4, 4)), "scale": 1, "shift": 0}, r"float64 of shape"),
        ({"latents": np.full((2, 4, 4, 4), np.nan), "scale": 1, "shift": 0}, r"finite"),
    ],
)
def test_files_that_hold_no_latents(tmp_path, arrays, message):
    np.savez(tmp_path / "z.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        data.load("latents", path=tmp_path / "z.npz")
    with pytest.raises(FileNotFoundError, match=r"none.npz.*autoencoders.write"):
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
    run, mesh = training.prepare(config_of(folder), jax.devices()[:1])
    assert run.model.channels == 4 and run.data.shape == (4, 4, 4)

    class Stored(training.Sampler):
        def __call__(self, source, key, index):
            return z[index % 5], index

    images, _ = Stored(run, mesh).sample(None, 3, 0)
    np.testing.assert_allclose(images, autoencoders.decode(SMALL, params, z[:3]), atol=1e-6)
    plain, _ = Stored(run, mesh).sample(None, 3, 0, decode=False)
    np.testing.assert_array_equal(plain, z[:3])


def test_wrong_autoencoders(autoencoder, tmp_path):
    folder, _, z = autoencoder
    with pytest.raises(ValueError, match="autoencoder kind 'vae'"):
        training.prepare(config_of(folder, **{"autoencoder.kind": "vae"}))
    with pytest.raises(FileNotFoundError, match=r"'none'.*--config.autoencoder.path="):
        training.prepare(config_of(folder, **{"autoencoder.path": "none"}))
    np.savez(tmp_path / "z.npz", latents=z, scale=2.0, shift=0.0)
    config = config_of(folder, **{"data.options.path": str(tmp_path / "z.npz")})
    run = training.build(config, training.load_data(config))
    with pytest.raises(ValueError, match=r"taesd.npz.*latents/z.*4 channels.*\(1.0, 0.0\).*\(2.0, 0.0\)"):
        run.decode(z)
