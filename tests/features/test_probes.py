"""Probes, correspondence, segmentation and storage, against closed forms and scikit-learn."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import RidgeClassifier
from sklearn.metrics import jaccard_score

from jaxdiff import data, features
from jaxdiff.features import probes, segmentation, store
from jaxdiff.features.correspondence import contrast
from jaxdiff.models import DiT

RNG = np.random.default_rng(0)


def test_linear_probe_is_ridge_classification():
    labels = RNG.integers(4, size=300)
    rows = RNG.normal(size=(300, 2, 2, 3)) * [1, 5, 0.9] + np.eye(4)[labels].reshape(300, 2, 2, 1)
    flat = rows.reshape(300, 12)
    scaled = (flat - flat[:200].mean(0)) / flat[:200].std(0)
    expected = RidgeClassifier(alpha=0.01 * 200).fit(scaled[:200], labels[:200]).predict(scaled[200:])
    accuracy, found = probes.linear_probe((rows[:200], labels[:200]), (rows[200:], labels[200:]))
    np.testing.assert_array_equal(found, expected)
    assert accuracy == (expected == labels[200:]).mean() and 0.4 < accuracy < 1


# ------------------------------------------------------------------------------------ correspondence


def test_matching_follows_a_shift_at_any_resolution():
    source = RNG.normal(size=(2, 6, 8, 16)).astype(np.float32)
    target = np.roll(source, (1, 2), axis=(1, 2))
    points = np.array([[[3, 2], [0, 0]], [[5.2, 4.4], [1, 3]]], np.float32)
    match = lambda a, b, p, size: probes.match(jnp.asarray(a), jnp.asarray(b), jnp.asarray(p), size)  # noqa: E731
    np.testing.assert_array_equal(match(source, target, points, (6, 8)), np.round(points) + [2, 1])
    assert probes.pck(match(source, source, points, (6, 8)), points, 8) == 1
    fine = match(source, target, 2 * points + 0.5, (12, 16))  # a cell is 2 x 2 pixels, its centre between them
    assert probes.pck(fine, 2 * (np.round(points) + [2, 1]) + 0.5, 16, alpha=0.13) == 1


def test_pck_counts_points_within_the_image_or_the_box():
    truth = np.zeros((2, 3, 2))
    found = np.array([[[0, 0], [3, 0], [0, 4.1]], [[0.5, 0], [9, 0], [0, 1]]])
    assert probes.pck(found, truth, 10, alpha=0.1) == 3 / 6
    assert probes.pck(found, truth, 10, alpha=0.1, visible=[[1, 1, 0], [1, 0, 0]]) == 2 / 3
    boxes = np.array([[1, 2, 5, 42], [0, 0, 5, 3]])
    np.testing.assert_array_equal(probes.box_extent(boxes), [40, 5])
    assert probes.pck(found, truth, probes.box_extent(boxes), alpha=0.1) == 3 / 6
    assert probes.pck(7 * found, 7 * truth, 70) == probes.pck(found, truth, 10)
    chance = RNG.uniform(0, 100, size=(4000, 1, 2))
    assert abs(probes.pck(chance, np.full((4000, 1, 2), 50.0), 100) - np.pi / 100) < 0.01


def test_joined_activations_are_those_of_each_image_alone():
    """Whatever else is in the batch, whatever the scale; by default the values are kept."""
    parts = {"a": RNG.normal(size=(3, 4, 4, 3)), "b": 1e3 * RNG.normal(size=(3, 8, 8, 5))}
    parts["b"][2] *= 50
    plain, unit = (np.asarray(probes.concatenate(parts, (8, 8), scale=scale)) for scale in ("none", "unit"))
    alone = {name: value[:1] for name, value in parts.items()}
    for scale, joined in {"none": plain, "unit": unit}.items():
        assert joined.shape == (3, 8, 8, 8)
        np.testing.assert_allclose(probes.concatenate(alone, (8, 8), scale=scale)[0], joined[0], rtol=1e-6)
    np.testing.assert_array_equal(plain, probes.concatenate(parts, (8, 8)))
    np.testing.assert_array_equal(plain[..., 3:], parts["b"].astype(np.float32))
    for channels in (slice(3), slice(3, None)):
        np.testing.assert_allclose(np.square(unit[..., channels]).mean((1, 2, 3)), 1, rtol=1e-5)


def test_a_trained_layer_learns_what_to_look_at():
    """Four channels tell the place, six louder ones are noise of each image."""
    pattern, noise = np.tile(RNG.normal(size=(1, 6, 6, 4)), (2, 80, 1, 1, 1)), 1.5 * RNG.normal(size=(2, 80, 6, 6, 6))
    source, target = np.concatenate([pattern, noise], -1).astype(np.float32)
    points = RNG.integers(0, 6, size=(80, 5, 2)).astype(np.float32)
    head, params, losses = probes.fit_aggregation(source[:64], target[:64], (points[:64],) * 2, steps=60, rate=1e-2)
    apply = jax.jit(lambda f: head.apply({"params": params}, f))

    def score(*sides):
        found = probes.match(*(jnp.asarray(side) for side in sides), jnp.asarray(points[64:]), (6, 6))
        return probes.pck(found, points[64:], 6)

    assert score(source[64:], target[64:]) < 0.3 < 0.7 < score(apply(source[64:]), apply(target[64:]))
    assert losses[-1] < 0.1 * losses[0]


def test_points_that_are_not_seen_do_not_train_the_layer():
    a, b = jnp.asarray(RNG.normal(size=(2, 3, 6, 6, 4)), jnp.float32)
    points, visible = (
        RNG.integers(0, 6, size=(2, 3, 5, 2)).astype(np.float32),
        np.arange(5) < np.array([5, 3, 2])[:, None],
    )
    hidden = np.where(visible[..., None], points, 6 - points)
    each = [
        float(contrast(a[i : i + 1], b[i : i + 1], jnp.asarray(points[:, i : i + 1, :seen]), 0.07))
        for i, seen in enumerate(visible.sum(1))
    ]
    for given in (points, hidden):
        found = float(contrast(a, b, jnp.asarray(given), 0.07, jnp.asarray(visible)))
        np.testing.assert_allclose(found, np.average(each, weights=visible.sum(1)), rtol=1e-5)


def test_the_layer_starts_without_changing_any_cosine():
    head = probes.Aggregation(6)
    f = jnp.asarray(RNG.normal(size=(1, 3, 3, 6)), jnp.float32)
    out, _ = jax.jit(head.init_with_output)(jax.random.key(0), f)
    np.testing.assert_allclose(*((g.reshape(9, 6) @ g.reshape(9, 6).T) for g in (out, f)), atol=1e-4)


# ------------------------------------------------------------------------------------ segmentation


def test_predictions_on_ignored_pixels_count_nowhere():
    truth, found = np.array([0, 0, 1, probes.IGNORE]), np.array([0, 0, 1, 1])
    assert probes.mean_iou(found, truth, 3) == 1  # the union of class 1 is one pixel, and class 2 does not occur


def test_mean_iou_is_the_jaccard_score_and_ignores_what_is_unlabelled():
    truth, found = RNG.integers(4, size=(3, 5, 5)), RNG.integers(4, size=(3, 5, 5))
    expected = jaccard_score(truth.ravel(), found.ravel(), average="macro")
    assert abs(probes.mean_iou(found, truth, 4) - expected) < 1e-12
    masked = np.where(RNG.uniform(size=truth.shape) < 0.3, probes.IGNORE, truth)
    seen = masked != probes.IGNORE
    assert abs(probes.mean_iou(found, masked, 4) - jaccard_score(truth[seen], found[seen], average="macro")) < 1e-12
    swap = np.array([2, 0, 3, 1])
    counts = [probes.confusion(*pair, 4) for pair in ((found, truth), (swap[found], swap[truth]))]
    np.testing.assert_array_equal(probes.iou(counts[1])[swap], probes.iou(counts[0]))
    assert np.isnan(probes.iou(probes.confusion(found, truth, 5))[4])


def test_votes_and_disagreement():
    vote = jax.jit(segmentation.vote)
    votes, gap = vote(jnp.asarray(20 * np.eye(3)[[[0, 1, 2], [0, 1, 0], [0, 2, 1]]], jnp.float32))
    np.testing.assert_array_equal(votes, [0, 1, 0])  # a tie goes to the lowest
    thirds = -(2 / 3 * np.log(2 / 3) + 1 / 3 * np.log(1 / 3))
    np.testing.assert_allclose(gap, [0, thirds, np.log(3)], atol=1e-5)
    same = np.tile(RNG.normal(size=(1, 3, 3)), (3, 1, 1)).astype(np.float32)
    votes, gap = vote(jnp.asarray(same))
    np.testing.assert_array_equal(votes, same[0].argmax(-1))
    np.testing.assert_allclose(gap, 0, atol=1e-6)


@pytest.fixture(scope="module")
def labelled():
    """Parts of 40 creatures, and features on half the grid that tell them but for noise."""
    parts = data.creature_set(40, 16).parts
    onehot = np.eye(5)[parts]
    coarse = onehot.reshape(40, 8, 2, 8, 2, 5).mean((2, 4)) @ RNG.normal(size=(5, 12))
    return parts, {"fine": 30 * onehot @ RNG.normal(size=(5, 8)) + RNG.normal(size=(40, 16, 16, 8)), "coarse": coarse}


def test_pixel_ensemble_learns_from_a_few_images_and_ignores_the_unlabelled(labelled):
    parts, found = labelled
    masks = parts[:6].copy()
    masks[:, :4] = np.where(RNG.uniform(size=masks[:, :4].shape) < 0.5, probes.IGNORE, masks[:, :4])
    ensemble = probes.fit_pixels(found["fine"][:6], masks, 5, members=3, hidden=(16,), steps=400)
    votes, gap = ensemble.predict(found["fine"][6:])
    assert votes.shape == gap.shape == (34, 16, 16) and (gap >= -1e-5).all()
    assert probes.mean_iou(votes, parts[6:], 5) > 0.95
    again = probes.fit_pixels(found["fine"][:6], masks, 5, members=3, hidden=(16,), steps=400)
    jax.tree.map(np.testing.assert_array_equal, ensemble.params, again.params)
    first = [jax.tree.leaves(jax.tree.map(lambda leaf, i=i: leaf[i], ensemble.params))[1] for i in (0, 1)]
    assert np.abs(first[0] - first[1]).max() > 0.01


def test_dense_head_joins_grids(labelled):
    parts, found = labelled
    masks = np.where(np.arange(16) < 14, parts, probes.IGNORE)
    train, test = ({name: value[rows] for name, value in found.items()} for rows in (slice(30), slice(30, None)))
    head, params, losses = probes.fit_dense(train, masks[:30], 5, width=16, steps=60, batch=8, rate=1e-2)
    logits = jax.jit(lambda f: head.apply({"params": params}, f))(
        {n: jnp.asarray(v, jnp.float32) for n, v in test.items()}
    )
    assert logits.shape == (10, 16, 16, 5) and losses[-1] < 0.3 * losses[0]
    assert probes.mean_iou(logits.argmax(-1), masks[30:], 5) > 0.8


def test_ignored_pixels_have_no_gradient():
    logits = jnp.asarray(RNG.normal(size=(1, 2, 2, 3)), jnp.float32)
    slope = jax.jit(jax.grad(segmentation.masked_loss))(logits, jnp.array([[[0, probes.IGNORE], [2, 1]]]))
    assert (np.asarray(slope)[0, 0, 1] == 0).all() and (np.abs(slope).sum(-1) > 0).sum() == 3


# ------------------------------------------------------------------------------------ storage


def test_features_are_stored_in_shards_and_read_back(tmp_path):
    rows = {
        "up/a": RNG.normal(size=(25, 2, 3)).astype(np.float32),
        "b": np.asarray(jnp.arange(25.0, dtype=jnp.bfloat16)),
    }
    batches = ({name: value[i : i + 7] for name, value in rows.items()} for i in range(0, 25, 7))
    store.write(tmp_path / "f", batches, shard=10, about={"sigma": 0.2})
    noted = store.index(tmp_path / "f")
    assert (noted["size"], noted["shards"], noted["about"]) == (25, 3, {"sigma": 0.2})
    shards = list(store.read(tmp_path / "f"))
    assert [len(shard["b"]) for shard in shards] == [10, 10, 5] and shards[0]["b"].dtype == jnp.bfloat16
    for name in rows:
        np.testing.assert_array_equal(np.concatenate([shard[name] for shard in shards]), rows[name])
    assert [list(shard) for shard in store.read(tmp_path / "f", ["b"])] == [["b"]] * 3


def test_memory_does_not_grow_with_the_number_of_images(tmp_path):
    def peak(count):
        tracemalloc.start()
        store.write(tmp_path / str(count), ({"a": np.zeros((10, 1000), np.float32)} for _ in range(count)), shard=40)
        for shard in store.read(tmp_path / str(count)):
            assert shard["a"].shape[1] == 1000
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    assert peak(80) < 1.3 * peak(10)


def test_a_stream_is_extraction_whatever_the_batches():
    model = DiT(depth=1, width=16, heads=2, num_classes=3, learn_variance=False)
    x0, label = jnp.asarray(RNG.normal(size=(6, 4, 4, 4)), jnp.float32), jnp.arange(6) % 3
    params = jax.jit(model.init)(jax.random.key(0), x0, jnp.ones(6), {"label": label})["params"]
    batches = [{"image": x0[i : i + 4], "label": label[i : i + 4]} for i in (0, 4)]
    options = {"select": ["embedded", "blocks_0/mlp/inner"], "dtype": jnp.float32}
    parts = list(features.stream(model, params, batches, 5, 0.3, conditions=("label",), **options))
    whole = features.extract(model, params, x0, 5, 0.3, {"label": label}, **options)
    assert [len(part["embedded"]) for part in parts] == [4, 2]
    for name, value in whole.items():
        np.testing.assert_allclose(np.concatenate([part[name] for part in parts]), value, rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------ messages


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda d: probes.linear_probe((np.zeros((3, 2)), [0, 1, 1]), (np.zeros((2, 3)), [0, 1])), ValueError, r"\(3, 2\) with \(3,\) labels"),
        (lambda d: probes.pck(np.zeros((1, 2, 2)), np.zeros((1, 2, 2)), 1, visible=[[0, 0]]), ValueError, "visible keypoints"),
        (lambda d: probes.concatenate({}, (2, 2), scale="units"), ValueError, "scale 'units'.*unit"),
        (lambda d: probes.confusion([0, 1], [0, 7], 3), ValueError, "label 7.*3 classes"),
        (lambda d: probes.confusion([0, 1], [0], 3), ValueError, "2 and 1"),
        (lambda d: probes.fit_pixels(np.zeros((4, 4, 2)), np.zeros((8, 8)), 2), ValueError, "16 pixels.*64 labels"),
        (lambda d: probes.fit_pixels(np.zeros((2, 2)), np.full(2, 255), 2), ValueError, "every pixel is labelled 255"),
        (lambda d: probes.fit_dense({"a": np.zeros((2, 4, 4, 1))}, np.zeros((3, 4, 4)), 2), ValueError, "a has 2 images.*3 masks"),
        (lambda d: store.write(d, [], shard=2), ValueError, "no features"),
        (lambda d: store.write(d.parent.parent, []), ValueError, "empty folder"),
        (lambda d: store.write(d, [{"a": np.zeros((1, 2))}, {"a": np.zeros((1, 3))}]), ValueError, r"shapes"),
        (lambda d: next(store.read(d)), FileNotFoundError, "index.json"),
        (lambda d: next(store.read(store.write(d, [{"a": np.zeros(2)}]), ["b"])), ValueError, "'b'.*a"),
    ],
)  # fmt: skip
def test_bad_input_says_what_to_do(call, error, message, tmp_path):
    with pytest.raises(error, match=message):
        call(tmp_path / "new")
