"""The classifier that comes with the package: what it reads, what it is made of, that the script makes it."""

import hashlib
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxdiff.evaluation import DigitsClassifier, classifier

SCRIPT = Path(__file__).parents[2] / "experiments" / "evaluation" / "train_digits_classifier.py"


@pytest.fixture(scope="module")
def script():
    pytest.importorskip("optax")
    return runpy.run_path(str(SCRIPT))


def accuracy(images, labels):
    model, params, _ = classifier.load()
    logits = jax.jit(model.apply)({"params": params}, images)["logits"]
    return (np.asarray(logits).argmax(-1) == labels).mean()


def test_held_out_digits_are_read(script):
    (images, labels), (held, truth) = script["split"]()
    assert len(images) + len(held) == 1797
    assert len(held) == 359
    assert images.min() == -1
    assert images.max() == 1
    assert accuracy(held, truth) >= 0.985
    assert accuracy(images, labels) >= 0.985


def test_weights_are_small_and_hashed():
    model, params, sha256 = classifier.load()
    data = classifier.WEIGHTS.read_bytes()
    assert sha256 == hashlib.sha256(data).hexdigest()
    assert len(data) < 200_000
    init = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 8, 8, 1), np.float32))["params"]
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, init)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(params))


def test_other_images_are_refused():
    with pytest.raises(ValueError, match=r"\[b, 8, 8, 1\], got \(2, 32, 32, 3\)"):
        jax.eval_shape(DigitsClassifier().init, jax.random.key(0), np.zeros((2, 32, 32, 3), np.float32))


def test_augmented_digits_stay_near_their_place(script):
    image = np.full((50, 8, 8, 1), -1, np.float32)
    image[:, 4, 4] = 1
    moved = script["augment"](image, np.random.default_rng(0))
    peaks = {divmod(int(m.argmax()), 8) for m in moved}
    assert peaks == {(4, 4), (3, 4), (5, 4), (4, 3), (4, 5)}
