"""Score distillation against mathematics: closed forms by quadrature, divergences by finite differences, the head.

In one dimension the teacher is N(m, s^2), the generator a + b z, and D_S is exact for N(a, b^2). Expectations over
(z, eps) are Gauss-Hermite sums in float64.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.scipy.special import ndtri
from method_parts import build_method
from test_methods_emd import BATCH, TEACHER, Affine
from training_runs import assert_same_bits

from jaxdiff import denoisers, models, solvers
from jaxdiff.conventions import EDM
from jaxdiff.methods import (
    Parts,
    Sampling,
    diff_instruct,
    dmd2,
    emd,
    exported,
    f_distill,
    optimizers,
    sid,
    uni_instruct,
)
from jaxdiff.methods.generators import Generator
from jaxdiff.methods.heads import BINS, EDGES, Head, HeadOptions, RatioWeight, classify, middle
from jaxdiff.methods.langevin import normals
from jaxdiff.methods.score_rules import Networks
from jaxdiff.models import taps

POINTS = [
    {"m": 1.0, "s": 0.5, "a": -0.3, "b": 1.2, "sigma": 0.75},
    {"m": -0.5, "s": 1.5, "a": 0.4, "b": 0.7, "sigma": 1.8},
    {"m": 0.3, "s": 0.8, "a": 0.0, "b": 1.1, "sigma": 2.0},
]
PARTS = Parts(models.MLP(), optimizers(optax.sgd(0.1)), convention=EDM())  # a rule reads its convention alone


def no_loop(z, cond=None):
    raise AssertionError("these rules do not differentiate by z")


def one(made, teacher, sigma):
    return jnp.ones_like(sigma)


def nodes(count):
    """(z, eps, weight) of a product rule that is exact for polynomials of degree 2 count - 1 in both."""
    x, w = np.polynomial.hermite_e.hermegauss(count)
    z, eps = (grid.ravel() for grid in np.meshgrid(x, x))
    return z, eps, np.outer(w, w).ravel() / (2 * np.pi)


def exact(m, s, a, b, sigma, head=False):
    """The networks of a point; the head's logits are the log ratio of the noisy densities."""
    v_p, v_q = s**2 + sigma**2, b**2 + sigma**2

    def log_ratio(x, sigma, cond=None):
        x = x[:, 0]
        return 0.5 * (jnp.log(v_q / v_p) + (x - a) ** 2 / v_q - (x - m) ** 2 / v_p)

    means = jnp.ones(BINS + 1)
    generate = lambda params, z, cond=None, start=None: params["a"] + params["b"] * z  # noqa: E731
    return Networks(
        denoisers.gaussian(m, s), denoisers.gaussian(a, b), generate, no_loop, log_ratio if head else None, means
    )


def expected(point, rule, count=24, head=False):
    """(dL/da, dL/db): the rule's gradient of one node at a time, summed with the weights of the quadrature."""
    z, eps, weight = nodes(count)
    networks = exact(**point, head=head)
    params = {"a": jnp.float64(point["a"]), "b": jnp.float64(point["b"])}

    @jax.jit
    @jax.vmap
    def gradient(z, eps):
        examples = {"z": z[None, None], "eps": eps[None, None], "sigma": jnp.full(1, point["sigma"])}
        return rule(networks, params, examples)[0]

    found = gradient(jnp.asarray(z), jnp.asarray(eps))
    return np.array([(np.asarray(found[name]) * weight).sum() for name in ("a", "b")])


def gains(point):
    s, b, sigma = point["s"], point["b"], point["sigma"]
    return s**2 / (s**2 + sigma**2), b**2 / (b**2 + sigma**2)


@pytest.mark.parametrize("point", POINTS)
def test_diff_instruct_has_its_closed_form(point, x64):
    S, B = gains(point)
    rule = diff_instruct.rule(diff_instruct.Options(weight=jnp.ones_like), PARTS)
    wanted = -(point["m"] - point["a"]) * (1 - S), -point["b"] * (S - B)
    np.testing.assert_allclose(expected(point, rule), wanted, rtol=1e-9)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.2])
@pytest.mark.parametrize("point", POINTS[:2])
def test_sid_has_its_closed_form(point, alpha, x64):
    S, B = gains(point)
    Q = S - B
    rule = sid.rule(sid.Options(weight=jnp.ones_like, alpha=alpha), PARTS)
    slope_a = (point["m"] - point["a"]) * (1 - S) * (Q * (1 - 2 * alpha) + S - 1)
    wanted = slope_a, -2 * point["b"] * Q * ((1 - S) + alpha * Q)
    np.testing.assert_allclose(expected(point, rule), wanted, rtol=1e-8)


def test_sid_pushes_a_too_wide_generator_out_where_alpha_exceeds_one(x64):
    """b is too large. dL/db > 0 narrows it; at alpha = 1.2 it turns negative where B - S = 5 (1 - B)."""
    sigma, s = 0.1, 0.05
    S = s**2 / (s**2 + sigma**2)
    turn = (S + 5) / 6  # the B of the sign change
    for B, alpha, sign in ((0.98 * turn, 1.2, 1), (1.02 * turn, 1.2, -1), (1.02 * turn, 1.0, 1), (0.999, 1.0, 1)):
        point = {"m": 0.0, "s": s, "a": 0.0, "b": sigma * (B / (1 - B)) ** 0.5, "sigma": sigma}
        rule = sid.rule(sid.Options(weight=jnp.ones_like, alpha=alpha), PARTS)
        assert np.sign(expected(point, rule)[1]) == sign, (B, alpha)


def test_nothing_is_learnt_where_the_densities_agree(x64):
    point = {"m": 0.3, "s": 0.8, "a": 0.3, "b": 0.8, "sigma": 0.6}
    rules = [diff_instruct.rule(diff_instruct.Options(weight="dmd"), PARTS), sid.rule(sid.Options(), PARTS)]
    for module, h in ((f_distill, f_distill.DIVERGENCES["kl"]), (uni_instruct, uni_instruct.DIVERGENCES["kl"])):
        rules.append(module.rule(module.Options(gan=0.0), PARTS, RatioWeight(h)))
    rules.append(dmd2.rule(dmd2.Options(gan=0.3), PARTS))
    for rule in rules:
        np.testing.assert_allclose(expected(point, rule, head=True), 0.0, atol=1e-12)


# ------------------------------------------------------------------------------------------ divergences


def densities(point, a, b):
    """log p and log q of the noisy teacher and generator on a grid of x, and its step."""
    x = np.linspace(-14, 14, 20_001)
    out = []
    for mean, std in ((point["m"], point["s"]), (a, b)):
        v = std**2 + point["sigma"] ** 2
        out.append(-0.5 * ((x - mean) ** 2 / v + np.log(2 * np.pi * v)))
    return *out, x[1] - x[0]


F = {
    "reverse_kl": lambda r: -jnp.log(r),
    "softened": lambda r: (r + 1) * jnp.log((r + 1) / (2 * r)),
    "js": lambda r: r * jnp.log(r) - (r + 1) * jnp.log((r + 1) / 2),
    "hellinger": lambda r: 4 * (1 - jnp.sqrt(r)),
    "kl": lambda r: r * jnp.log(r),
    "jeffreys": lambda r: (r - 1) * jnp.log(r),
}


@pytest.mark.parametrize("name", F)
def test_f_distill_descends_its_divergence(name, x64):
    """Against finite differences of D_f(p | q) on a grid, and h(r) = f''(r) r^2."""
    r = jnp.linspace(0.05, 8.0, 50)
    h = f_distill.DIVERGENCES[name]
    np.testing.assert_allclose(h(r), jax.vmap(jax.grad(jax.grad(F[name])))(r) * r**2, rtol=1e-6)

    point = {"m": 0.4, "s": 0.7, "a": 0.0, "b": 1.0, "sigma": 0.75}  # close enough that no ratio is clipped
    rule = f_distill.rule(f_distill.Options(gan=0.0, weight="eps"), PARTS, RatioWeight(h))
    found = expected(point, rule, count=40, head=True)

    def divergence(a, b):
        log_p, log_q, dx = densities(point, a, b)
        return float((np.exp(log_q) * np.asarray(F[name](jnp.exp(log_p - log_q)))).sum() * dx)

    a, b, step = point["a"], point["b"], 1e-5
    wanted = [
        (divergence(a + step, b) - divergence(a - step, b)) / (2 * step),
        (divergence(a, b + step) - divergence(a, b - step)) / (2 * step),
    ]
    np.testing.assert_allclose(found, wanted, rtol=2e-4)


def test_uni_instructs_losses_add_up_to_the_forward_divergence(x64):
    """KL(p | q) = 1/2 int E_q r |gap|^2 / sigma^4 d sigma^2; alpha = 0 gives E r |gap|^2, D_S being exact."""
    point = {"m": 0.6, "s": 0.5, "a": 0.0, "b": 0.9}
    z, eps, weight = nodes(40)
    examples = {"z": jnp.asarray(z)[:, None], "eps": jnp.asarray(eps)[:, None]}
    made = point["a"] + point["b"] * examples["z"]

    def at(sigma):
        networks = exact(**point, sigma=sigma, head=True)
        given = {**examples, "sigma": jnp.full(len(z), sigma)}
        losses, _ = sid.identity_losses(networks, made, given, 0.0, one)
        x = made + sigma * given["eps"]
        factor, _ = RatioWeight(uni_instruct.DIVERGENCES["kl"]).weights(
            networks.means, networks.head(x, given["sigma"]), given["sigma"]
        )
        return (jnp.asarray(weight) * factor * losses).sum()

    u, du = np.linspace(np.log(1e-3), np.log(1e3), 400, retstep=True)  # sigma = exp(u), d sigma^2 = 2 sigma^2 du
    sigmas = np.exp(u)
    values = np.asarray(jax.jit(lambda s: jax.lax.map(at, s))(jnp.asarray(sigmas)))
    total = 0.5 * (values / sigmas**4 * 2 * sigmas**2).sum() * du
    p, q = point["s"] ** 2, point["b"] ** 2
    wanted = 0.5 * (np.log(q / p) + (p + (point["m"] - point["a"]) ** 2) / q - 1)
    assert total == pytest.approx(wanted, rel=1e-3)


# ------------------------------------------------------------------------------------------ gradients


def small_network(seed, width=5):
    """(params, function) of a tanh network on [b 3] with its noise level, in float64."""
    rng = np.random.default_rng(seed)
    params = {"w": jnp.asarray(0.5 * rng.normal(size=(4, width))), "v": jnp.asarray(0.5 * rng.normal(size=(width, 3)))}

    def run(params, x, sigma):
        level = jnp.broadcast_to(jnp.log(sigma)[:, None], (len(x), 1))
        return 0.6 * x + jnp.tanh(jnp.concatenate([x, level], 1) @ params["w"]) @ params["v"]

    return params, run


@pytest.mark.parametrize("method", [sid, uni_instruct])
def test_gradients_pass_through_both_networks(method, x64):
    """Against finite differences of the loss, with D_S, the weights and the head's ratio held at their values."""
    rng = np.random.default_rng(0)
    sigma = jnp.asarray([0.3, 0.8, 1.5, 4.0])
    z, eps = (jnp.asarray(rng.normal(size=(4, 3))) for _ in range(2))
    (theta, run), (t, _), (s, _) = (small_network(seed) for seed in range(3))
    logits = lambda x, sigma, cond=None: jnp.tanh(x).sum(1) - 0.2 * sigma  # noqa: E731

    def generate(params, z, cond=None, start=None):
        return run(params, 2.0 * z, jnp.full(4, 2.0))

    teacher, score = (lambda x, sigma, cond=None, p=p: run(p, x, sigma) for p in (t, s))
    means = jnp.append(jnp.full(BINS, 1.3), 0.7)
    networks = Networks(teacher, score, generate, no_loop, logits, means)
    extra = (RatioWeight(uni_instruct.DIVERGENCES["jeffreys"]),) if method is uni_instruct else ()
    options = method.Options(**({"gan": 0.1} if extra else {}))
    found, metrics = method.rule(options, PARTS, *extra)(networks, theta, {"z": z, "eps": eps, "sigma": sigma})

    base = generate(theta, z)
    held = 1 / jnp.abs(base - teacher(base + sigma[:, None] * eps, sigma)).mean(1)
    if extra:
        r = jnp.exp(logits(base + sigma[:, None] * eps, sigma)) / 1.3
        held = held * (0.4 * r + 0.6) / 0.7

    def loss(params):
        made = generate(params, z)
        x = made + sigma[:, None] * eps
        gap = teacher(x, sigma) - score(x, sigma)
        value = (held * (gap * (teacher(x, sigma) - made - 1.2 * gap)).mean(1)).mean()
        return value + (0.1 * jnp.log1p(jnp.exp(-logits(x, sigma))).mean() if extra else 0.0)

    assert float(metrics["loss"]) == pytest.approx(float(loss(theta)))
    direction = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape)), theta)
    ahead, behind = (jax.tree.map(lambda p, d, h=h: p + h * d, theta, direction) for h in (1e-5, -1e-5))
    numeric = (loss(ahead) - loss(behind)) / 2e-5
    along = sum(jnp.vdot(found[name], direction[name]) for name in theta)
    assert float(along) == pytest.approx(float(numeric), rel=1e-7)


def test_dmds_weight_makes_examples_move_alike():
    """w = 1 / mean |g - D_T| per example, not differentiated: scaling an example's error leaves w gap."""
    made = jnp.asarray([[1.0, 2.0], [10.0, 20.0]])
    networks = Networks(lambda x, s, c: 0.5 * x, lambda x, s, c: 0.6 * x, lambda p, z, c, s: p * made, no_loop)
    examples = {"z": made, "eps": jnp.zeros((2, 2)), "sigma": jnp.ones(2)}
    slope, _ = diff_instruct.gap_slope(networks, made, examples, diff_instruct.weighting("dmd", PARTS))
    np.testing.assert_allclose(slope[0], slope[1], rtol=1e-6)
    np.testing.assert_allclose(slope[0], 0.1 * made[0] / (0.5 * made[0]).mean() / 4, rtol=1e-5)


# ------------------------------------------------------------------------------------------ the head


def test_the_head_is_best_at_the_log_ratio(x64):
    """Two Gaussians, whose log ratio is quadratic: Newton's method on the loss finds its three coefficients."""
    (m, s), (a, b), n = (0.7, 0.6), (-0.2, 1.0), 20_000
    normal = ndtri((jnp.arange(n, dtype=jnp.float64) + 0.5) / n)
    real, fake = m + s * normal, a + b * normal
    columns = lambda x: jnp.stack([jnp.ones_like(x), x, x**2])  # noqa: E731
    loss = lambda k: classify(k @ columns(real), k @ columns(fake))  # noqa: E731
    k = jnp.zeros(3)
    for _ in range(12):
        k = k - jnp.linalg.solve(jax.hessian(loss)(k), jax.grad(loss)(k))
    wanted = [
        jnp.log(b / s) - 0.5 * (m / s) ** 2 + 0.5 * (a / b) ** 2,
        m / s**2 - a / b**2,
        0.5 / b**2 - 0.5 / s**2,
    ]
    np.testing.assert_allclose(k, wanted, rtol=2e-3)
    assert float(loss(k)) < 2 * np.log(2)  # that of a head that knows nothing


def test_r1_is_the_squared_slope_on_real_images():
    head = Head(HeadOptions(r1=0.5), PARTS, models.MLP())
    logits = lambda x, sigma, cond=None: (x**2).sum(1)  # noqa: E731
    real, fake = (
        {"x0": x, "eps": jnp.zeros((2, 3)), "sigma": jnp.ones(2)} for x in (jnp.ones((2, 3)), jnp.zeros((2, 3)))
    )
    loss, metrics = head.loss(logits, fake, real)
    assert float(metrics["head_r1"]) == pytest.approx(12.0)  # |2 x|^2
    assert float(loss) == pytest.approx(float(classify(jnp.full(2, 3.0), jnp.zeros(2))) + 6.0)


def test_weights_do_not_depend_on_how_a_batch_is_cut():
    """Sums of two halves, averaged as accumulation does, move the means as the whole does; empty bins stay."""
    ratio = RatioWeight(f_distill.DIVERGENCES["kl"], 0.9)
    logits, sigma = jnp.linspace(-12.0, 12.0, 8), jnp.asarray([0.01, 0.02, 0.3, 0.3, 0.3, 5.0, 5.0, 5.0])
    means = jnp.append(jnp.linspace(1.0, 2.0, BINS), 1.5)
    weights, whole = ratio.weights(means, logits, sigma)
    halves = [ratio.weights(means, logits[i::2], sigma[i::2]) for i in (0, 1)]
    np.testing.assert_array_equal(weights[0::2], halves[0][0])
    joined = jax.tree.map(lambda a, b: (a + b) / 2, halves[0][1], halves[1][1])
    new = ratio.updated(means, whole)
    chex.assert_trees_all_close(ratio.updated(means, joined), new, rtol=1e-6)
    used = np.searchsorted(EDGES, np.log(np.asarray(sigma)))
    unused = np.setdiff1d(np.arange(BINS), used)
    np.testing.assert_array_equal(new[unused], means[unused])
    clipped = np.exp(np.clip(np.asarray(logits), -10, 10))
    last = used[-1]
    np.testing.assert_allclose(new[last], 0.9 * means[last] + 0.1 * clipped[5:].mean(), rtol=1e-5)
    np.testing.assert_allclose(weights, clipped / np.asarray(means)[used] / 1.5, rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "shape", "name"),
    [
        (models.MLP(width=8, depth=3), (2, 2), "block_1/out"),
        (models.DiT(channels=1, patch=2, depth=3, width=8, heads=2, scan=True), (2, 4, 4, 1), "blocks_1/out"),
        (models.UNet(resolution=8, channels=1, width=8, channel_mult=(1, 2), blocks=1, attention=()), (2, 8, 8, 1), "dec_4x4_in1/out"),
    ],
)  # fmt: skip
def test_the_head_reads_the_middle_of_a_network(model, shape, name):
    """By itself when no name is given; a scanned network is read block by block."""
    x, label, chosen = jnp.ones(shape), jnp.ones(2), []
    parts = Parts(model, optimizers(optax.sgd(0.1)), convention=EDM())

    def read(tap):
        params = model.init(jax.random.key(0), x, label)["params"]
        seen = taps.record(taps.unrolled(model), taps.unstacked(model, params), x, label)[1]
        chosen.append(middle(seen))
        return Head(HeadOptions(tap=tap), parts, model).activation(params, x, label, None), seen[name]

    found, wanted = jax.eval_shape(lambda: read(""))
    assert chosen == [name] and found == wanted
    with pytest.raises(ValueError, match="unknown activation of a head 'nowhere'"):
        jax.eval_shape(lambda: read("nowhere"))


# ------------------------------------------------------------------------------------------ the methods


class Tapped(Affine):
    """Affine with an activation."""

    @nn.compact
    def __call__(self, x, noise_label, cond=None, *, deterministic=True):
        out = super().__call__(x, noise_label, cond, deterministic=deterministic)
        return taps.tap(self, "block/out", out)


REAL = {"image": jax.random.normal(jax.random.key(9), (16, 2)), "label": jnp.arange(16) % 3}


def make(module, **options):
    options = {"sigma_max": 2.0, "model": Tapped(), "average": lambda step, batch: jnp.float32(0.1), **options}
    return build_method(module, options.pop("model"), optax.sgd(0.1), optax.sgd(0.05), **options)


def stepped(method, steps=1, batch=REAL):
    state = method.init(jax.random.key(0), batch, {"teacher": TEACHER})
    step = jax.jit(method.step)
    for i in range(steps):
        state, metrics = step(state, batch, jax.random.key(i))
    return state, metrics


def test_dmd2_without_its_head_is_dmd_to_the_bit():
    (one, seen), (other, wanted) = stepped(make(dmd2, gan=0.0), 2), stepped(make(diff_instruct, weight="dmd"), 2)
    assert_same_bits(one, other)
    assert_same_bits(seen, wanted)
    assert "head" not in one.params


def test_emds_setting_of_diff_instruct_is_diff_instruct():
    one, seen = stepped(make(emd, **emd.DIFF_INSTRUCT), batch=BATCH)
    other, wanted = stepped(make(diff_instruct), batch=BATCH)
    chex.assert_trees_all_close(one, other, rtol=1e-6)
    for name in ("loss", "grad_norm", "score_loss"):
        np.testing.assert_allclose(seen[name], wanted[name], rtol=1e-5)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), other.params["student"], TEACHER)
    assert all(value > 1e-5 for value in jax.tree.leaves(moved)), moved


def test_data_free_methods_see_only_shapes_and_those_with_a_head_see_images():
    changed = {**REAL, "image": REAL["image"] + 1.0}
    for module, blind in ((sid, True), (dmd2, False)):
        method = make(module)
        state, step = method.init(jax.random.key(0), REAL, {"teacher": TEACHER}), jax.jit(method.step)
        one, other = (step(state, batch, jax.random.key(1))[0] for batch in (REAL, changed))
        same = jax.tree.map(lambda a, b: bool((a == b).all()), one.params, other.params)
        assert all(jax.tree.leaves(same)) == blind


@pytest.mark.parametrize("head_on", ["score", "teacher"])
def test_a_heads_loss_trains_the_score_only_if_it_reads_it(head_on):
    """After two updates, since the head starts at zero; the student differs by the adversarial term."""
    state, metrics = stepped(make(dmd2, gan=0.5, head_on=head_on, head_weight=1.0, score_updates=2))
    plain, _ = stepped(make(diff_instruct, weight="dmd", score_updates=2))
    same = np.array_equal(state.params["score"]["p"], plain.params["score"]["p"])
    assert same == (head_on == "teacher")
    assert not np.array_equal(state.params["student"]["p"], plain.params["student"]["p"])
    assert set(metrics) >= {"head_loss", "head_real", "head_fake", "adversarial", "spread", "score_gap"}


def test_a_head_that_knows_nothing_makes_f_distill_dmd2_and_uni_instruct_sid():
    """With a rate of zero the logits stay zero: r = 1, whatever the divergence."""
    still = {"head_weight": 0.0, "gan": 0.0}
    for module, plain, divergence in ((f_distill, diff_instruct, "jeffreys"), (uni_instruct, sid, "kl")):
        state, metrics = stepped(make(module, divergence=divergence, **still))
        wanted, _ = stepped(make(plain, weight="dmd"))
        chex.assert_trees_all_close(state.params["student"], wanted.params["student"], rtol=1e-6)
        assert float(metrics["effective"]) == pytest.approx(1.0)
        np.testing.assert_allclose(state.averages["ratio"][:BINS], 1.0, rtol=1e-6)


def test_the_running_means_follow_the_head():
    method = make(f_distill, divergence="js", head_weight=1.0, score_updates=4, ratio_decay=0.5)
    state, metrics = stepped(method, 3)
    ratio = np.asarray(state.averages["ratio"])[:BINS]
    assert (ratio != 1.0).sum() >= 3 and np.isfinite(ratio).all() and 0 < float(metrics["effective"]) < 1
    assert float(state.averages["ratio"][BINS]) != 0.5


# ------------------------------------------------------------------------------------------ several steps


def several(origin):
    sampling = Sampling(grid=lambda n: solvers.grid(n, 0.5, 4.0), timestamps=3, sigma_max=4.0)
    parts = Parts(Tapped(), optimizers(optax.sgd(0.1)), convention=denoisers.edm, sampling=sampling)
    return Generator(parts, origin=origin)


def test_a_later_step_starts_from_the_students_own_earlier_ones():
    generator, cond = several("student"), {"label": REAL["label"]}
    drawn = generator.draw(jax.random.key(3), REAL)
    z = jax.random.normal(jax.random.key(4), (16, 2))
    begun = generator.begin(TEACHER, {"z": z, "cond": cond, **drawn})
    index, keys = drawn["step"]["index"], drawn["step"]["key"]
    assert set(np.asarray(index)) == {0, 1, 2}
    denoise = denoisers.edm(lambda x, noise, cond: Tapped().apply({"params": TEACHER}, x, noise, cond))
    x, levels = jnp.zeros((16, 2)), jnp.asarray(solvers.grid(3, 0.5, 4.0), jnp.float32)
    walked = [x]
    for k in range(2):
        x = denoise(x + levels[k] * normals(keys, jnp.int32(k), z), levels[k], cond)
        walked.append(x)
    wanted = jnp.stack(walked)[index, jnp.arange(16)]
    np.testing.assert_allclose(begun["start"]["origin"], wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(begun["start"]["sigma"], levels[index])
    made = generator(TEACHER, z, cond, begun["start"])
    level = levels[index]
    np.testing.assert_allclose(made, denoise(wanted + level[:, None] * z, level, cond), rtol=1e-5, atol=1e-6)


def test_a_later_step_may_start_from_real_images():
    generator = several("data")
    drawn = generator.draw(jax.random.key(3), REAL)
    begun = generator.begin(TEACHER, {"z": jnp.zeros((16, 2)), **drawn})
    later = np.asarray(drawn["step"]["index"]) > 0
    np.testing.assert_array_equal(begun["start"]["origin"][later], REAL["image"][later])
    np.testing.assert_array_equal(begun["start"]["origin"][~later], 0.0)
    assert generator.reads_data and not several("student").reads_data


def test_samples_of_several_steps_are_renoised():
    generator, cond, key = several("student"), {"label": REAL["label"]}, jax.random.key(8)
    noise = jax.random.normal(jax.random.key(4), (16, 2))
    levels = solvers.grid(3, 0.5, 4.0)
    denoise = denoisers.edm(lambda x, noise, cond: Tapped().apply({"params": TEACHER}, x, noise, cond))
    wanted = solvers.solve(denoise, 4.0 * noise, levels, "renoise", cond, key=key, final_denoise=True)
    np.testing.assert_allclose(generator.sample(TEACHER, noise, cond, key), wanted, rtol=1e-5)


def test_a_student_of_several_steps_takes_a_step():
    grid = lambda n: solvers.grid(n, 0.5, 4.0)  # noqa: E731
    for origin in ("student", "data"):
        method = make(dmd2, origin=origin, timestamps=2, grid=grid, sigma_max=4.0)
        state, metrics = stepped(method)
        assert all(np.isfinite(value) for value in metrics.values())
        assert method.sample(exported(state), REAL["image"], {"label": REAL["label"]}, jax.random.key(0)).shape == (
            16,
            2,
        )


# ------------------------------------------------------------------------------------------ bad arguments


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (diff_instruct, {"weight": "dmd3"}, "unknown loss weight 'dmd3'"),
        (diff_instruct, {"origin": "noise"}, "unknown origin of a student's steps 'noise'"),
        (sid, {"score_network": "other"}, "unknown score_network 'other'"),
        (dmd2, {"head_on": "student"}, "unknown network of a head 'student'"),
        (dmd2, {"gan": -1.0}, "not negative"),
        (dmd2, {"head_on": "teacher", "analytic": denoisers.gaussian(0.0, 1.0)}, "teacher, which has no network"),
        (f_distill, {"divergence": "rkl"}, "unknown divergence 'rkl'.*reverse_kl"),
        (f_distill, {"ratio_decay": 1.0}, "ratio_decay lies between 0 and 1"),
        (uni_instruct, {"divergence": "js"}, "unknown divergence 'js'"),
        (dmd2, {"timestamps": 2, "input_scale": "one"}, "input_scale='one' is for one step"),
    ],
)
def test_bad_options(module, options, message):
    with pytest.raises(ValueError, match=message):
        make(module, **options)


@pytest.mark.parametrize(
    "module", [f_distill, *(pytest.param(m, marks=pytest.mark.slow) for m in (diff_instruct, sid, dmd2, uni_instruct))]
)
def test_a_step_lowers_for_accelerators(module):
    """On a UNet, with several updates of the score and two steps of the student."""
    model = models.UNet(resolution=8, channels=1, width=8, channel_mult=(1,), blocks=1, attention=())
    batch = {"image": jnp.zeros((8, 8, 8, 1))}
    grid = lambda n: solvers.grid(n, 0.5, 4.0)  # noqa: E731
    method = build_method(module, model, optax.sgd(0.1), score_updates=2, timestamps=2, grid=grid)
    teacher = jax.eval_shape(lambda: model.init(jax.random.key(0), batch["image"], 1.0)["params"])
    shapes = jax.eval_shape(method.init, jax.random.key(0), batch, {"teacher": teacher})
    key = jax.eval_shape(lambda: jax.random.key(0))
    program = jax.export.export(jax.jit(method.step), platforms=["tpu", "cuda"])(shapes, batch, key)
    assert program.platforms == ("tpu", "cuda") and "callback" not in program.mlir_module()
