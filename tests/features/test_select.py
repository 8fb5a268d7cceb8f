"""Statistics of activations against closed forms, the filter, pruning, and the comparison that ends in a list."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdiff import features
from jaxdiff.features import Score, Tap

RNG = np.random.default_rng(0)


# ------------------------------------------------------------------------------------ statistics


def test_noise_to_signal_of_a_known_mixture():
    """f = image + noise of variance 4 and 0.25, whatever the number of draws."""
    image, noise = RNG.normal(size=(300, 1, 4, 4, 3)), RNG.normal(size=(300, 5, 4, 4, 3))
    assert abs(features.noise_to_signal(2 * image + 0.5 * noise) - 0.25 / 4) < 0.003
    assert abs(features.noise_to_signal(image + 2 * noise[:, :2]) - 4) < 0.5  # not limited by two draws
    assert features.noise_to_signal(np.repeat(image, 2, axis=1)) == 0
    assert features.noise_to_signal(noise) > 50  # noise alone
    assert features.noise_to_signal(np.ones((2, 2, 1, 1, 1)) * [[[[[1.0]]]], [[[[1.0]]]]]) == np.inf


def test_noise_leak_is_the_share_of_noise_that_can_be_read():
    """f = noise on its grid + as much of something else: R^2 = 1 / (1 + s^2)."""
    eps = RNG.normal(size=(40, 2, 8, 16, 2))
    coarse = eps.reshape(40, 2, 4, 2, 8, 2, 2).mean((3, 5))
    other = RNG.normal(size=(40, 2, 4, 8, 3))
    mix = RNG.normal(size=(2, 2))
    assert features.noise_leak(np.concatenate([coarse @ mix, other], -1), eps) > 0.99
    half = coarse + 0.5 * RNG.normal(size=coarse.shape)  # coarse has std 1/2 as well
    assert abs(features.noise_leak(half, eps) - 0.5) < 0.05
    assert abs(features.noise_leak(other, eps)) < 0.02


@pytest.mark.parametrize(("height", "width", "rows", "columns"), [(8, 8, 3, 0), (16, 8, 0, 2), (8, 16, 3, 4)])
def test_granularity_of_waves_is_their_frequency(height, width, rows, columns):
    y, x = np.mgrid[:height, :width]
    phase = RNG.uniform(0, 6, size=(5, 1, 1, 1))
    waves = np.cos(2 * np.pi * (rows * y / height + columns * x / width)[None, None] + phase)
    both = np.concatenate([waves[..., None] @ RNG.normal(size=(1, 4)) + RNG.normal(size=4)] * 2, axis=1)
    noisy = both + np.array([1, -1]).reshape(1, 2, 1, 1, 1) * RNG.normal(size=both[:, :1].shape)  # cancels in the mean
    np.testing.assert_allclose(features.granularity(noisy), np.hypot(rows, columns), rtol=1e-5)


def test_locality_of_places_and_of_parts():
    parts = np.zeros((3, 8, 8), int)
    parts[:, :, 3] = parts[:, 5] = 1  # a cross, so that both parts reach far
    y, x = np.mgrid[:8, :8] / 8
    turns = np.stack([np.cos(np.pi * x), np.sin(np.pi * x), np.cos(np.pi * y), np.sin(np.pi * y)], -1)
    places, onehot, chance = np.stack([turns] * 3), np.eye(2)[parts], RNG.normal(size=(3, 8, 8, 4))
    assert features.locality(places, parts, far=0.4) > 0.98
    assert features.locality(onehot, parts, far=0.4) == 0
    assert abs(features.locality(chance, parts, far=0.4) - 0.5) < 0.1
    ignored = np.where(np.arange(8) < 6, parts, 255)
    assert features.locality(onehot, ignored, far=0.4) == 0
    assert features.neighbour_locality(places) > 5 and abs(features.neighbour_locality(chance) - 1) < 0.4


def test_cka_is_that_of_centred_kernels():
    a, b = RNG.normal(size=(30, 5)), RNG.normal(size=(30, 4)) + 3
    centre = np.eye(30) - 1 / 30
    k, m = centre @ a @ a.T @ centre, centre @ b @ b.T @ centre
    expected = (k * m).sum() / np.sqrt((k * k).sum() * (m * m).sum())
    assert abs(features.cka(a.reshape(5, 6, 5), b) - expected) < 1e-12
    rotation = np.linalg.qr(RNG.normal(size=(5, 5)))[0]
    assert abs(features.cka(a, 7 * a @ rotation + 1) - 1) < 1e-12
    assert features.cka(a, np.ones((30, 2))) == 0


# ------------------------------------------------------------------------------------ the filter


def tap(name, kind, side, order, stage="up"):
    return Tap(name, kind, stage, (1, side, side, 4), jnp.float32, (side, side), order, 0)


ROWS = [
    tap("in", "in", 64, 0, "in"), tap("down/a/out", "res_out", 32, 1, "down"), tap("mid/out", "res_out", 8, 2, "mid"),
    tap("up0/out", "res_out", 1, 3), tap("up1/q", "self_q", 8, 4), tap("up1/out", "res_out", 8, 5),
    tap("up2/q", "self_q", 8, 6), tap("up2/c", "cross_q", 8, 7), tap("up3/q", "self_q", 16, 8),
    tap("up4/out", "res_out", 32, 9), tap("up5/out", "res_out", 32, 10), tap("up5/map", "self_map", 32, 11)._replace(grid=None),
    tap("out", "out", 64, 12, "out"),
]  # fmt: skip
TABLE = {row.name: row for row in ROWS}


def test_the_filter_gives_a_reason_for_all_it_drops():
    reasons = features.Filter().reasons(TABLE)
    assert {name: reason for name, reason in reasons.items() if reason} == {
        "in": "stage in", "down/a/out": "stage down", "mid/out": "stage mid", "out": "stage out",
        "up0/out": "grid 1x1 is too coarse",
        "up1/q": "first module of its resolution", "up1/out": "first module of its resolution",
        "up2/q": "self_q below the finest attention",
        "up5/map": "self_map has no spatial grid",
    }  # fmt: skip
    assert features.Filter().keep(TABLE) == ("up2/c", "up3/q", "up4/out", "up5/out")  # up4: above the attention


def test_without_attention_first_modules_below_the_input_grid_are_dropped():
    table = {name: row for name, row in TABLE.items() if row.kind != "self_q"}
    dropped = [name for name, reason in features.Filter().reasons(table).items() if reason.startswith("first")]
    assert dropped == ["up1/out", "up4/out"]


@pytest.mark.parametrize(
    ("changes", "added"),
    [
        ({"stages": ("down", "up")}, {"down/a/out"}),
        ({"min_grid": 0.0}, set()),  # up0 is still the first of its resolution
        ({"min_grid": 0.0, "skip_first": False}, {"up0/out", "up1/out"}),
        ({"local_kinds": ()}, {"up2/q"}),
    ],
)
def test_every_rule_is_a_field(changes, added):
    assert set(features.Filter(**changes).keep(TABLE)) - set(features.Filter().keep(TABLE)) == added


def test_noise_is_judged_by_leak_or_else_by_ratio():
    leaks = {"up2/c": {"leak": 0.19, "nsr": 99.0}, "up5/out": {"leak": 0.21}}
    assert features.Filter().keep(TABLE, leaks) == ("up2/c", "up3/q", "up4/out")
    assert features.Filter(max_leak=0.1).keep(TABLE, leaks) == ("up3/q", "up4/out")
    ratios = {"up1/out": {"nsr": 0.02}, "up5/out": {"nsr": 0.11}, "up2/c": {"nsr": 0.09}, "up3/q": {"nsr": 0.1001}}
    assert features.Filter().keep(TABLE, ratios) == ("up2/c", "up4/out")
    assert features.Filter(max_noise_ratio=6.0).keep(TABLE, ratios) == ("up2/c", "up3/q", "up4/out", "up5/out")


def test_pruning_keeps_the_first_of_those_alike_on_one_grid():
    a, b = RNG.normal(size=(2, 4, 4, 3, 5))
    found = {"a": a, "b": b, "a again": 3 * a + 0.01 * b, "a small": a[:, ::2, ::2], "b again": b[..., ::-1]}
    assert features.prune(found) == ("a", "b", "a small")
    assert features.prune(found, max_cka=1.1) == tuple(found)


# ------------------------------------------------------------------------------------ comparison


VALUES = {"up2/c": 0.5, "up2/q": 0.4, "up1/out": 0.3, "up3/q": 0.6, "up4/out": 0.55, "up5/out": 0.45}


def additive(names, seed):
    """up3/q and up2/c complement each other, nothing else adds to the best."""
    both = {"up3/q", "up2/c"} <= set(names)
    value = max(VALUES[name] for name in names) + 0.1 * both + 0.01 * np.sin(7 * seed)
    return {"simple": value + 0.1, "complex": value - 0.1}


def test_comparison_ends_in_the_best_list(tmp_path):
    tried = []

    def score(names, seed):
        tried.append(names)
        return additive(names, seed)

    found = features.compare(TABLE, list(VALUES), score, seeds=(0, 1, 2, 3))
    assert found.names == ("up2/c", "up3/q")  # in order of execution
    assert abs(found.score.mean - 0.7) < 0.02 and set(found.score.values) == {"simple", "complex"}
    assert set(found.alone) == set(VALUES) and [names for names, _ in found.steps] == [("up3/q",), found.names]
    assert not [names for names in tried if len(names) > 1 and "up1/out" in names]  # the third best of its grid
    found.save(tmp_path / "list.json")
    assert features.load_selection(tmp_path / "list.json") == found


def test_gains_within_their_error_are_not_taken():
    noise = iter(np.random.default_rng(1).normal(size=1000))
    found = features.compare(TABLE, ["up2/c", "up3/q"], lambda names, seed: {"all": next(noise)}, margin=4.0)
    assert len(found.names) == 1
    assert Score({"a": [1.0, 2.0], "b": [3.0, 4.0]}).gain(Score({"a": [0.0, 0.0]})) == (2.5, 0.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: features.compare(TABLE, [], additive), r"candidates.*got 0 and 3"),
        (lambda: features.compare(TABLE, ["up2/c"], additive, seeds=[0]), r"got 1 and 1"),
        (lambda: features.noise_to_signal(np.zeros((5, 1, 2, 2, 3))), r"2 draws.*got 5 and 1"),
        (lambda: features.noise_leak(np.zeros((4, 1, 3, 3, 2)), np.zeros((4, 1, 8, 8, 2))), r"got features \(4, 1, 3, 3, 2\)"),
        (lambda: features.locality(np.zeros((1, 8, 8, 2)), np.zeros((1, 8, 8), int)), r"neighbour of another part"),
        (lambda: features.neighbour_locality(np.zeros((1, 2, 2, 1))), r"2x2.*got count=8"),
    ],
)  # fmt: skip
def test_bad_input_says_what_is_needed(call, message):
    with pytest.raises(ValueError, match=message):
        call()
