"""The assignment solver against SciPy, brute force and its own bounds; noise assignment against its closed forms."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from scipy.optimize import linear_sum_assignment

from jaxdiff.noise import assign, distance_reduction, linear_assignment
from jaxdiff.noise import assignment as module

COUNT = 176  # problems of a size, everywhere the same so that a program serves several tests
EXPECTED_MAXIMUM = {2: 0.564, 4: 1.029, 16: 1.766, 64: 2.344}  # of k standard normals


def smooth(rng, n, size=32, channels=3, rms=0.5):
    """Images with a 1/f spectrum, flattened: like natural ones in how they resemble each other."""
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.fftfreq(size))
    frequency[0, 0] = 1 / size
    images = np.fft.ifft2(np.fft.fft2(rng.normal(size=(n, channels, size, size))) / frequency).real
    return np.float32(rms * images / images.std()).reshape(n, -1)


def dot_costs(rng, n, natural=False, d=3072):
    x = smooth(rng, n) if natural else 0.5 * rng.normal(size=(n, d))
    return np.float32(-x @ rng.normal(size=(n, d)).T)


def least(cost):
    rows, columns = linear_sum_assignment(cost)
    return np.float64(cost)[rows, columns].sum()


def check_optimal(costs, exact=True, gap=2e-6, given=None):
    """Each of the costs [b, n, n] is solved as well as by SciPy, up to a share of what its entries span."""
    found = module.solve(jnp.asarray(costs if given is None else given), exact=exact)
    n = costs.shape[-1]
    for cost, permutation, bound in zip(costs, np.asarray(found.permutation), np.asarray(found.gap), strict=True):
        np.testing.assert_array_equal(np.sort(permutation), np.arange(n))
        total, optimum = np.float64(cost)[np.arange(n), permutation].sum(), least(cost)
        span = n * np.abs(np.float64(cost)).max()
        assert total - optimum <= gap * span, (total, optimum)
        assert bound >= total - optimum - 1e-6 * span  # the certificate holds ...
        assert not exact or bound <= gap * span  # ... and certifies
    return found


KINDS = {
    "gaussian": lambda rng, n: rng.normal(size=(n, n)),
    "natural": lambda rng, n: smooth(rng, n, 8, 1) @ rng.normal(size=(64, n)),
    "ties": lambda rng, n: rng.integers(0, 4, (n, n)),
    "integers": lambda rng, n: rng.integers(-1000, 1000, (n, n)),
    "constant": lambda rng, n: np.full((n, n), rng.normal()),
    "product": lambda rng, n: np.outer(np.arange(n), np.arange(n)),
    "repeated rows": lambda rng, n: rng.normal(size=(n, n))[rng.integers(0, 1 + n // 3, n)],
    "heavy tails": lambda rng, n: rng.standard_cauchy((n, n)),
    "huge": lambda rng, n: 1e38 * rng.uniform(-1, 1, (n, n)),
    "tiny": lambda rng, n: 1e-36 * rng.normal(size=(n, n)),
    "far from zero": lambda rng, n: 1000 + rng.normal(size=(n, n)),
}


@pytest.mark.parametrize("n", [1, 2, 3, 6, 17, 64])
def test_it_is_optimal_whatever_the_costs(n):
    rng = np.random.default_rng(n)
    names = np.resize(list(KINDS), COUNT)
    costs = np.stack([np.float32(KINDS[name](rng, n)) for name in names])
    found = np.asarray(check_optimal(costs).permutation)
    for name, cost, permutation in zip(names, np.float64(costs), found, strict=True):
        total = cost[np.arange(n), permutation].sum()
        if name in ("ties", "integers", "product"):  # whole numbers leave no room for rounding
            assert total == least(cost)
        if n <= 6 and name == "gaussian":
            every = np.array(list(itertools.permutations(range(n))))
            assert total == cost[np.arange(n), every].sum(1).min()


@pytest.mark.parametrize(("n", "largest", "smooth"), [(128, 2.43, 0.0174), (256, 2.66, 0.0187), (512, 2.90, 0.0203)])
def test_images_and_noise_come_nearer_as_predicted(n, largest, smooth):
    batches = [pairs(n), pairs(n, rms=1.0), pairs(n, natural=True)]
    costs = np.stack([-np.asarray(x0) @ np.asarray(eps).T for x0, eps in batches])
    found = check_optimal(costs, gap=1e-7)
    assigned = [eps[index] for (_, eps), index in zip(batches, found.permutation, strict=True)]
    nearer = [float(distance_reduction(*batch, chosen)) for batch, chosen in zip(batches, assigned, strict=True)]
    for s, reduction in zip((0.5, 1.0), nearer[:2], strict=True):
        assert abs(reduction - s * largest / (np.sqrt(3072) * (1 + s**2))) < 0.001
    assert 0.018 < nearer[1] < 0.028  # published: 1.9 to 2.7 %; at unit RMS 2.70 is expected for 512, give or take 0.1
    assert abs(nearer[2] - smooth) < 0.001  # measured once with an independent solver
    x0 = np.asarray(batches[0][0])
    along = (x0 * np.asarray(assigned[0])).sum(1) / np.linalg.norm(x0, axis=1)
    assert abs(along.mean() - largest) < 0.1


def test_near_exact_loses_at_most_a_hundred_thousandth_of_the_gain():
    n, rng = 256, np.random.default_rng(0)
    costs = np.stack([dot_costs(rng, n, natural) for natural in (False, True)])
    found = linear_assignment(jnp.asarray(costs[:, None]), exact=False)
    assert found.shape == (2, 1, n)
    for cost, permutation in zip(np.float64(costs), np.asarray(found[:, 0]), strict=True):
        assert cost[np.arange(n), permutation].sum() - least(cost) <= 1e-5 * (np.trace(cost) - least(cost))


def test_it_is_optimal_at_1024():
    check_optimal(dot_costs(np.random.default_rng(0), 1024, True)[None], gap=1e-7)


def test_it_takes_half_precision():
    given = jnp.asarray(8 * np.random.default_rng(0).normal(size=(50, 17, 17)), jnp.bfloat16)
    assert check_optimal(np.asarray(given.astype(jnp.float32)), given=given).permutation.dtype == jnp.int32


def test_it_is_equivariant_and_ignores_what_is_constant_in_rows_and_columns():
    rng = np.random.default_rng(0)
    cost = np.float32(rng.normal(size=(16, 16)))
    shuffle, plain = rng.permutation(16), np.asarray(linear_assignment(jnp.asarray(cost)))
    np.testing.assert_array_equal(linear_assignment(jnp.asarray(cost[shuffle])), plain[shuffle])
    np.testing.assert_array_equal(linear_assignment(jnp.asarray(cost[:, shuffle])), np.argsort(shuffle)[plain])
    shifted = 3 * cost + np.float32(rng.normal(size=(16, 1))) + np.float32(rng.normal(size=16))
    np.testing.assert_array_equal(linear_assignment(jnp.asarray(shifted)), plain)


def hard(n):
    """Costs with a price war: every row wants the same few columns, by ever so little."""
    rng = np.random.default_rng(n)
    return np.float32(np.minimum(np.arange(n), 3)[None] + 1e-4 * rng.uniform(size=(n, n)))


def bounds(n, block):
    rounds = len(module.STEPS) * (32 + 4 * -(-n // min(block, n)))
    return rounds, n * n


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_costs_that_are_not_finite_are_flagged(bad):
    costs = np.float32(np.random.default_rng(0).normal(size=(COUNT, 64, 64)))
    costs[1, 3, 5], costs[2] = bad, bad
    found = module.solve(jnp.asarray(costs))
    for i, flagged in enumerate([False, True, True, False]):
        assert (np.asarray(found.permutation[i]) == -1).all() == flagged and bool(jnp.isnan(found.gap[i])) == flagged
    np.testing.assert_array_equal(found.permutation[0], linear_sum_assignment(costs[0])[1])
    assert int(linear_assignment(jnp.full((1, 1), bad))[0]) == -1
    assert (np.asarray(found.rounds) <= bounds(64, 32)[0]).all() and (
        np.asarray(found.scans) <= bounds(64, 32)[1]
    ).all()


def test_iterations_are_bounded():
    n = 64
    rng = np.random.default_rng(0)
    costs = [make(rng, n) for make in KINDS.values()] + [hard(n), -hard(n), np.full((n, n), np.nan)]
    found = module.solve(jnp.asarray(np.resize(np.float32(costs), (COUNT, n, n))))
    rounds, scans = bounds(n, 32)
    assert int(found.rounds.max()) <= rounds and int(found.scans.max()) <= scans
    check_optimal(np.resize([hard(n), -hard(n)], (COUNT, n, n)))


def test_members_of_a_vmap_need_different_numbers_of_paths():
    n = 16
    rng = np.random.default_rng(0)
    costs = np.stack([np.zeros((n, n)), np.eye(n), hard(n), rng.normal(size=(n, n)), np.full((n, n), np.nan)])
    wide = partial(module._solve, exact=True, block=128)  # as on an accelerator
    found = jax.jit(jax.vmap(wide))(jnp.asarray(np.float32(costs)))
    assert len(set(np.asarray(found.scans).tolist())) > 2
    for cost, permutation in zip(np.float32(costs[:-1]), np.asarray(found.permutation), strict=False):
        assert abs(np.float64(cost)[np.arange(n), permutation].sum() - least(cost)) < 1e-5
    assert (np.asarray(found.permutation[-1]) == -1).all()


def test_bad_shapes_are_refused():
    for shape in [(3,), (2, 3), (0, 0)]:
        with pytest.raises(ValueError, match=r"shape \(.*must end in two equal sizes.*pad"):
            linear_assignment(jnp.zeros(shape))


def test_it_lowers_for_accelerators():
    cost = jax.ShapeDtypeStruct((2, 16, 16), jnp.float32)
    exported = jax.export.export(jax.jit(linear_assignment), platforms=["cpu", "cuda", "tpu"])(cost)
    assert exported.platforms == ("cpu", "cuda", "tpu") and "callback" not in exported.mlir_module()


# ---- noise


def pairs(n, d=3072, rms=0.5, seed=0, natural=False):
    rng = np.random.default_rng(seed)
    x0 = smooth(rng, n, rms=rms) if natural else rms * rng.normal(size=(n, d))
    return jnp.asarray(x0, jnp.float32), jnp.asarray(rng.normal(size=(n, d)), jnp.float32)


def rows_of(eps, assigned):
    """For each assigned noise, which of the given ones it is, bit for bit."""
    place = {row.tobytes(): i for i, row in enumerate(np.asarray(eps))}
    return np.array([place[row.tobytes()] for row in np.asarray(assigned)])


@pytest.mark.parametrize("kind", ["hungarian", "hungarian_l2", "hungarian_l1", "rotated", "farthest", "none"])
def test_the_noises_stay_the_same_multiset(kind):
    x0, eps = (a.reshape(16, 4, 4, 2) for a in pairs(16, 32))
    index = rows_of(eps, assign(x0, eps, kind))
    np.testing.assert_array_equal(np.sort(index), np.arange(16))
    assert (index == np.arange(16)).all() == (kind == "none")


@pytest.mark.parametrize("half", [False, True])
def test_each_kind_minimises_its_distance(half):
    x0, eps = pairs(16, 48)
    x, e = np.float64(x0), np.float64(eps)
    apart = x[:, None] - e
    costs = {
        "hungarian": np.square(apart).sum(-1),
        "hungarian_l2": np.sqrt(np.square(apart).sum(-1)),
        "hungarian_l1": np.abs(apart).sum(-1),
        "farthest": -np.square(apart).sum(-1),
    }
    for kind, cost in costs.items():
        index = rows_of(eps, assign(x0, eps, kind, half=half))
        assert cost[np.arange(16), index].sum() - least(cost) <= (2e-3 if half else 1e-6) * (
            np.trace(cost) - least(cost)
        )


def test_rotated_is_as_sharp_but_no_nearer():
    x0, eps = pairs(64)
    nearer = {kind: float(distance_reduction(x0, eps, assign(x0, eps, kind))) for kind in ("hungarian", "rotated")}
    shuffle = np.random.default_rng(0).permutation(3072)
    seen = float(distance_reduction(x0, eps[:, shuffle], assign(x0, eps, "rotated")[:, shuffle]))
    assert abs(nearer["rotated"]) < 0.002 and abs(seen - nearer["hungarian"]) < 0.001


@pytest.mark.parametrize("k", [1, 4, 16])
def test_nearest_of_k_shrinks_the_noise_by_the_predicted_amount(k):
    x0, eps = pairs(512, 768)
    chosen = np.asarray(assign(x0, eps, "knn", key=jax.random.key(0), k=k))
    g = EXPECTED_MAXIMUM.get(k, 0.0)
    shrunk = 1 - np.square(chosen).mean()
    assert abs(shrunk - 2 * g / np.sqrt(768 * 3)) < 0.006
    along = (np.asarray(x0) * chosen).sum(1) / np.linalg.norm(x0, axis=1)
    assert abs(along.mean() - g / np.sqrt(3)) < 4 / np.sqrt(512)
    assert (k == 1) == bool((chosen == np.asarray(eps)).all())


def test_nearest_without_a_key_chooses_from_the_batch():
    x0, eps = pairs(16, 12)
    index = rows_of(eps, assign(x0, eps, "knn"))
    np.testing.assert_array_equal(index, np.linalg.norm(np.asarray(x0)[:, None] - np.asarray(eps), axis=-1).argmin(1))


def test_labels_keep_the_noise_within_its_class():
    x0, eps = pairs(64, 80)
    labels = np.random.default_rng(0).integers(0, 4, 64)
    labels[5] = 9  # a class of one keeps its noise
    index = rows_of(eps, assign(x0, eps, labels=jnp.asarray(labels)))
    np.testing.assert_array_equal(labels[index], labels)
    cost = -np.float64(x0) @ np.float64(eps).T
    for label in set(labels):
        members = np.flatnonzero(labels == label)
        total, within = cost[members, index[members]].sum(), cost[np.ix_(members, members)]
        assert total == pytest.approx(least(within), abs=1e-3)


def test_no_gradient_passes_and_bad_images_leave_the_noise_alone():
    x0, eps = pairs(16, 12)
    gradient = jax.grad(lambda x, e: jnp.square(assign(x, e)).sum(), argnums=(0, 1))(x0, eps)
    np.testing.assert_array_equal(gradient[0], 0)
    np.testing.assert_allclose(gradient[1], 2 * eps)
    bad = x0.at[0, 0].set(jnp.nan)
    np.testing.assert_array_equal(jax.jit(assign)(bad, eps), eps)
    with pytest.raises(ValueError, match="x0, the images, has NaN or infinite values"):
        assign(bad, eps)
    np.testing.assert_array_equal(jax.jit(jax.vmap(assign))(x0[None], eps[None])[0], assign(x0, eps))


@pytest.mark.parametrize("groups", [1, 8])
def test_eight_devices_give_what_one_gives(groups):
    """One solve over the global batch with a single all-gather, or one for each device's share with none."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "fsdp"))
    sharding, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ([("data", "fsdp")], []))
    x0, key = pairs(64, 48)[0], jax.random.key(0)

    def train(sharding, x0, key):
        eps = jax.random.normal(key, x0.shape)
        return eps, assign(x0, eps, sharding=sharding, groups=groups)

    program = jax.jit(partial(train, sharding), in_shardings=(sharding, everywhere))
    compiled = program.lower(x0, key).compile()
    eps, together = compiled(jax.device_put(x0, sharding), jax.device_put(key, everywhere))
    assert together.sharding.is_equivalent_to(sharding, 2)
    assert collectives(compiled.as_text()) == (["all-gather"] if groups == 1 else [])
    np.testing.assert_allclose(eps, eps := jax.random.normal(key, x0.shape), atol=1e-6)
    apart = [assign(x, e) for x, e in zip(jnp.split(x0, groups), jnp.split(eps, groups), strict=True)]
    np.testing.assert_allclose(together, jnp.concatenate(apart), atol=1e-6)


def collectives(text):
    names = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
    return [name for name in names for line in text.splitlines() if f" {name}(" in line or f" {name}-start(" in line]


def test_it_runs_inside_shard_map():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    costs = jnp.asarray(np.random.default_rng(0).normal(size=(8, 12, 12)), jnp.float32)
    spec = PartitionSpec("data")
    found = jax.jit(jax.shard_map(linear_assignment, mesh=mesh, in_specs=spec, out_specs=spec))(costs)
    np.testing.assert_array_equal(found, [linear_sum_assignment(cost)[1] for cost in np.asarray(costs)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "hungarien"}, r"hungarien.*did you mean 'hungarian'.*knn"),
        ({"eps": np.zeros((6, 4), np.float32)}, r"one shape \[b, \.\.\.\], got \(8, 4\) and \(6, 4\)"),
        ({"labels": np.zeros(3, np.int32)}, r"labels of shape \(3,\) for 8 images"),
        ({"groups": 3}, r"groups=3 for a batch of 8"),
        ({"limit": 4}, r"8 images.*limit=4.*groups.*knn"),
        ({"kind": "knn", "k": 0}, r"k=0"),
    ],
)
def test_bad_arguments_are_explained(change, message):
    given = {"x0": np.zeros((8, 4), np.float32), "eps": np.ones((8, 4), np.float32), **change}
    with pytest.raises(ValueError, match=message):
        assign(**{name: jnp.asarray(v) if isinstance(v, np.ndarray) else v for name, v in given.items()})
