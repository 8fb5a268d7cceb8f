"""Rules over flow maps against closed forms: exact students, hand-derived steps, derivatives, an exact teacher."""

import dataclasses
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from method_parts import build_method
from training_runs import config_of, images_of, points_of

from jaxdiff import denoisers, flow_maps, models, solvers
from jaxdiff.methods import METHODS, facm, flow_map, flow_targets, meanflow, scm, shortcut, trajectory
from jaxdiff.methods.flow_targets import Networks, total_derivative
from jaxdiff.models import attention, unet
from jaxdiff.training import load, prepare, train
from jaxdiff.training.inherit import student_config
from jaxdiff.training.state import declare

MEAN, STD, RATE = 0.3, 0.5, 0.1
TEACHER, EXACT = denoisers.gaussian(MEAN, STD), flow_maps.gaussian(MEAN, STD)
RULES = {"meanflow": meanflow, "shortcut": shortcut, "trajectory": trajectory, "scm": scm, "facm": facm}
SPREAD = {"mean": 0.0, "std": 1.0}  # of noise levels at which float64 shows all of a residual


class Bent(nn.Module):
    """The exact flow map of the data plus v x."""

    v: float = 0.0
    scalars: tuple[str, ...] = ("tau",)

    @nn.compact
    def __call__(self, x, sigma, cond=None, *, deterministic=True):
        v = self.param("v", lambda key: jnp.asarray(self.v, x.dtype))
        tau = cond["tau"] / (1000 - cond["tau"])
        return EXACT(x, sigma, tau) + v * x


def make(name, model=None, optimizer=None, **options):
    """A method whose network is a denoiser as it is; with a teacher, the exact one."""
    given = {"distil": True, "analytic": TEACHER, "convention": lambda network: network, **options}
    grid = lambda n: solvers.grid(n, 0.002, 80.0)  # noqa: E731
    given = {"grid": grid, **given}
    return build_method(RULES[name], model or Bent(), optimizer or optax.sgd(RATE), **given)


def batch_of(n=64, dim=2):
    return {"image": MEAN + STD * jax.random.normal(jax.random.key(3), (n, dim))}


def one_step(method, batch, key=5):
    state = method.init(jax.random.key(0), batch, {"teacher": {}})
    return state, *jax.jit(method.step)(state, batch, jax.random.key(key))


# ------------------------------------------------------------------------------------------ the exact flow map


@pytest.mark.parametrize("derivative", ["jvp", "difference"])
@pytest.mark.parametrize("name", ["meanflow", "scm", "facm"])
def test_the_exact_flow_map_has_no_tangent_residual(x64, name, derivative):
    options = {"warmup": 0} if name == "scm" else {}
    method = make(name, derivative=derivative, **SPREAD, **options)
    _, after, metrics = one_step(method, batch_of())
    assert float(metrics["error"]) < (1e-20 if derivative == "jvp" else 1e-6)
    np.testing.assert_allclose(after.params["student"]["v"], 0.0, atol=1e-8 if derivative == "jvp" else 2e-3)


def test_the_exact_flow_map_is_two_of_its_own_jumps(x64):
    _, _, metrics = one_step(make("shortcut", diagonal=0.3, **SPREAD), batch_of())
    assert float(metrics["error"]) < 1e-20


def test_any_split_of_a_jump_composes(x64):
    x, sigma = jnp.array([[1.3], [-2.0], [0.7]]), jnp.array([2.0, 5.0, 0.4])
    tau = jnp.array([0.5, 0.0, 0.4])  # between, to the end, on the diagonal
    for share in (0.1, 0.5, 0.9):
        mid = tau + share * (sigma - tau)
        first = EXACT(x, sigma, mid)
        second = EXACT(flow_maps.moved(x, first, sigma, mid), mid, tau)
        found = flow_targets.composed(first, second, sigma, mid, tau)
        np.testing.assert_allclose(found, EXACT(x, sigma, tau), rtol=1e-12)
    np.testing.assert_allclose(shortcut.halfway(jnp.array([1.0, 1e6]), jnp.array([0.0, 0.0])), [1 / 3, 1.0], rtol=1e-5)


def test_trajectory_targets_converge_to_the_exact_flow_map(x64):
    """The error of Heun's method, squared: sixteen times less with twice the steps."""
    errors = [
        float(one_step(make("trajectory", substeps=n, sigma_min=0.02, full=1.0, **SPREAD), batch_of())[2]["error"])
        for n in (6, 12)
    ]
    assert 8 < errors[0] / errors[1] < 30


def test_data_give_the_same_target_on_average(x64):
    """Gauss-Hermite quadrature over x0 given x: E of MeanFlow's target with v = eps - x0 is u."""
    x, sigma, tau = jnp.array([[1.3], [-0.4]]), jnp.array([2.0, 0.6]), jnp.array([0.5, 0.0])
    mean = TEACHER(x, sigma)
    spread = (STD * sigma / jnp.sqrt(STD**2 + sigma**2))[:, None]
    networks = Networks(EXACT, EXACT, None, None, {}, jnp.int32(0))
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    total = 0.0
    for node, weight in zip(nodes, weights / math.sqrt(2 * math.pi), strict=True):
        made, wanted, _ = flow_targets.tangent_target(networks, x, {"sigma": sigma}, tau, mean + spread * node, "jvp")
        total = total + weight * wanted
    np.testing.assert_allclose(total, EXACT(x, sigma, tau), rtol=1e-10)
    np.testing.assert_allclose(made, EXACT(x, sigma, tau), rtol=1e-12)


# ------------------------------------------------------------------------------------------ derivatives


def bent(x, sigma):
    """A function that is neither linear in x nor in sigma."""
    return jnp.tanh(x) * jnp.sqrt(1 + sigma)[:, None] + jnp.sin(x * sigma[:, None])


def test_jvp_and_difference_agree(x64):
    x, sigma = jnp.array([[0.3, -1.0], [1.3, 0.2]]), jnp.array([0.7, 2.0])
    for function, clean in ((bent, 0.4 * x), (lambda x, s: EXACT(x, s, 0.1), TEACHER(x, sigma))):
        value, slope = total_derivative(function, x, sigma, clean)
        again, found = total_derivative(function, x, sigma, clean, "difference", 3e-4)
        np.testing.assert_allclose(found, slope, rtol=0, atol=1e-6)
        np.testing.assert_array_equal(again, value)
    # and the derivative is that of the identity of flow maps
    identity = -0.1 * (EXACT(x, sigma, 0.1) - TEACHER(x, sigma)) / (sigma - 0.1)[:, None]
    np.testing.assert_allclose(slope, identity, rtol=1e-10)


class Convolved(nn.Module):
    """A network whose convolutions have the forms of a UNet's."""

    loop: bool = False
    scalars: tuple[str, ...] = ("tau",)

    @nn.compact
    def __call__(self, x, noise_label, cond=None, *, deterministic=True):
        form = unet._conv_form(self.loop)
        x = x + noise_label[:, None, None, None] + cond["tau"][:, None, None, None] / 1000
        x = nn.Conv(4, (3, 3), padding=1, name="in", **form)(x)
        return nn.Conv(1, (3, 3), padding=1, name="out", **form)(nn.silu(x))


def test_a_network_in_loop_form_has_the_difference():
    """Convolutions without forward mode, against XLA's."""
    plain = Convolved()
    x, sigma = jax.random.normal(jax.random.key(0), (2, 4, 4, 1)), jnp.array([0.5, 3.0])
    params = jax.jit(plain.init)(jax.random.key(1), x, jnp.ones(2), {"tau": jnp.ones(2)})["params"]

    def slope(model, how):
        network = flow_maps.of_network(denoisers.edm(models.bind(model, params)))
        return jax.jit(lambda: total_derivative(lambda x, s: network(x, s, 0.1), x, sigma, 0.2 * x, how)[1])()

    wanted = slope(plain, "jvp")
    looped = plain.clone(loop=True)
    np.testing.assert_allclose(slope(looped, "difference"), wanted, rtol=0, atol=2e-3 * jnp.abs(wanted).max())
    with pytest.raises(TypeError, match="forward-mode"):
        slope(looped, "jvp")
    for name in ("meanflow", "scm", "facm"):
        with pytest.raises(ValueError, match="derivative='difference'"):
            make(name, looped, convention=denoisers.edm)


def test_attention_is_plain_while_it_is_differentiated():
    seen = []

    def function(x, sigma):
        seen.append(attention.FORWARD_MODE.get())
        return x

    total_derivative(function, jnp.ones((1, 1)), jnp.ones(1), jnp.zeros((1, 1)))
    total_derivative(function, jnp.ones((1, 1)), jnp.ones(1), jnp.zeros((1, 1)), "difference")
    assert seen == [True, False, False, False]


def test_the_tangent_of_scm_is_the_published_one(x64):
    """In TrigFlow's own terms: theta, x_theta, F and dF/dtheta by their definitions."""
    s, w = 0.5, 0.3
    x0, z = jnp.array([[0.2, 1.0]]), s * jnp.array([[0.7, -1.1]])
    sigma = jnp.array([0.8])
    theta = jnp.arctan(sigma / s)

    def network(x_theta, theta):  # F, minus the output of an EDM network
        return jnp.tanh(1.3 * x_theta) * theta[:, None] + 0.2

    def end(x, sigma):
        theta = jnp.arctan(sigma / s)
        cos, sin = jnp.cos(theta)[:, None], jnp.sin(theta)[:, None]
        return cos**2 * x - sin * s * network(cos * x, theta)

    cos, sin = jnp.cos(theta)[:, None], jnp.sin(theta)[:, None]
    x_theta, moving = cos * x0 + sin * z, cos * z - sin * x0
    out, turned = jax.jvp(network, (x_theta, theta), (moving, jnp.ones(1)))
    published = -(cos**2) * (s * out - moving) - w * cos * sin * (x_theta + s * turned)
    made, slope = total_derivative(end, x_theta / cos, sigma, x0)
    np.testing.assert_allclose(scm.tangent(made, slope, x0, sigma, w, s), published, rtol=1e-10)


# ------------------------------------------------------------------------------------------ steps by hand


@pytest.mark.parametrize("power", [0.0, 1.0])
def test_a_step_of_meanflow_is_the_one_derived_by_hand(x64, power):
    """G = exact + v x; the derivative along the trajectory of the first follows from the identity, of x it is x - D."""
    v, batch = 0.2, batch_of(8, 1)
    method = make("meanflow", Bent(v), loss_power=power, **SPREAD)
    _, after, metrics = one_step(method, batch)
    keys = jax.random.split(jax.random.key(5), 3)
    eps = jax.random.normal(keys[1], batch["image"].shape, batch["image"].dtype)
    options = meanflow.Options(distil=True, **SPREAD)
    levels = flow_targets.draw_pairs(options)(keys[0], 8, jnp.int32(0))[0]
    sigma, tau = (np.asarray(levels[name])[:, None] for name in ("sigma", "tau"))
    assert 0 < (sigma == tau).sum() < 8 and (tau <= sigma).all()
    x = batch["image"] + jnp.asarray(sigma) * eps
    d, exact = (np.asarray(a) for a in (TEACHER(x, levels["sigma"]), EXACT(x, levels["sigma"], levels["tau"])))
    x = np.asarray(x)
    g = exact + v * x
    along = np.where(sigma == tau, 0.0, -tau * (exact - d) / np.where(sigma == tau, 1.0, sigma - tau)) + v * (x - d)
    target = tau / sigma * (1 + sigma) / (1 + tau) * (d - g) + g
    target = target - (sigma - tau) * (1 + sigma) / (sigma * (1 + tau)) * along
    gap = (1 + 1 / sigma) * (g - target)
    weight = 1 / (gap**2 + 1e-3) ** power
    slope = (2 * weight * gap * (1 + 1 / sigma) * x).mean()
    np.testing.assert_allclose(metrics["loss"], (weight * gap**2).mean(), rtol=1e-9)
    np.testing.assert_allclose(metrics["error"], (gap**2).mean(), rtol=1e-9)
    np.testing.assert_allclose(after.params["student"]["v"], v - RATE * slope, rtol=1e-9)


def test_scm_normalizes_tangents_and_learns_the_level_of_its_loss(x64):
    batch = batch_of(16, 3)
    method = make("scm", Bent(0.3), warmup=0, **SPREAD)
    state, after, metrics = one_step(method, batch)
    assert set(state.params) == {"student", "weight"} == set(state.opt_state)
    # u starts at 0, so the loss is the error, and its gradient by the bias is 1 - error
    np.testing.assert_allclose(metrics["loss"], metrics["error"])
    np.testing.assert_allclose(after.params["weight"]["bias"], -RATE * (1 - metrics["error"]), rtol=1e-6)
    assert 0.5 < float(metrics["error"]) < 1.0  # |g| / (|g| + 0.1) squared
    bare = make("scm", Bent(0.3), warmup=0, normalize=0.0, learn_weight=False, **SPREAD)
    state, after, metrics = one_step(bare, batch)
    assert set(state.params) == {"student"}
    assert float(metrics["error"]) > float(metrics["tangent"]) ** 2


def test_warmup_starts_from_the_denoiser(x64):
    """At step 0 sCM's tangent and MeanFlow's target vanish where G = D, the teacher at every tau."""

    class Teacher(Bent):
        @nn.compact
        def __call__(self, x, sigma, cond=None, *, deterministic=True):
            return self.param("v", lambda key: jnp.ones((), x.dtype)) * TEACHER(x, sigma)

    for name in ("scm", "meanflow"):
        errors = [
            float(one_step(make(name, Teacher(), warmup=warmup, **SPREAD), batch_of())[2]["error"])
            for warmup in (100, 0)
        ]
        assert errors[0] < 1e-20 < 1e-4 < errors[1]


def test_facm_relaxes_and_clips_its_targets(x64):
    """With all of the change clipped away the consistency loss is its limit, computed here."""
    clip, power = 1e-3, 0.5
    method = make("facm", Bent(0.3), clip=clip, anchor_weight=0.0, **SPREAD)
    _, _, metrics = one_step(method, batch_of(8, 1))
    keys = jax.random.split(jax.random.key(5), 3)
    sigma = flow_targets.draw_levels(facm.Options(**SPREAD))(keys[0], 8, jnp.int32(0))[0]["sigma"]
    t = np.asarray(sigma / (1 + sigma))
    e = (clip * (1 - np.sqrt(1 - t))) ** 2
    np.testing.assert_allclose(metrics["loss"], (np.sin(np.pi / 2 * t) * e / (e + 1e-3) ** power).mean(), rtol=1e-9)
    assert float(metrics["anchor_error"]) > 1e-3


# ------------------------------------------------------------------------------------------ guidance


class Classes(nn.Module):
    """G = w x + v label, with classes 0, 1 and 2, none."""

    num_classes: int = 2
    scalars: tuple[str, ...] = ("tau",)

    @nn.compact
    def __call__(self, x, sigma, cond=None, *, deterministic=True):
        w = self.param("w", nn.initializers.constant(0.3), ())
        v = self.param("v", nn.initializers.constant(0.2), ())
        return w * x + v * cond["label"][:, None].astype(x.dtype) + 0 * cond["tau"][:, None]


@pytest.mark.parametrize("mix", [0.0, 0.25])
def test_guidance_from_data_mixes_the_students_own_denoisers(mix):
    method = build_method(meanflow, Classes(), optax.sgd(0.0), convention=lambda n: n, guidance=3.0, guidance_mix=mix)
    batch = {"image": jnp.ones((4, 1)), "label": jnp.array([0, 1, 0, 1])}
    state = method.init(jax.random.key(0), batch)
    training = method.step.__self__
    networks = training.networks(state.params, state, jax.random.key(1))
    x, label = jnp.array([[1.0], [2.0], [3.0], [4.0]]), np.array([[0.0], [1.0], [0.0], [1.0]])
    examples = {"x0": jnp.full((4, 1), 0.5), "sigma": jnp.ones(4), "cond": {"label": batch["label"]}}
    own, free = 0.3 * x + 0.2 * label, 0.3 * x + 0.2 * 2
    wanted = 3.0 * 0.5 + mix * own + (1 - 3.0 - mix) * free
    np.testing.assert_allclose(networks.anchor(x, examples), wanted, rtol=1e-5, atol=1e-6)


def test_guidance_from_a_teacher_is_the_teachers():
    mixture = denoisers.gaussian_mixture(np.array([[-1.0], [1.0]]), 0.3)
    given = {"convention": lambda n: n, "guidance": 2.0, "distil": True, "analytic": mixture}
    method = build_method(meanflow, Classes(), optax.sgd(0.0), **given)
    batch = {"image": jnp.ones((2, 1)), "label": jnp.array([0, 1])}
    state = method.init(jax.random.key(0), batch, {"teacher": {}})
    networks = method.step.__self__.networks(state.params, state, jax.random.key(1))
    x, cond = jnp.array([[0.2], [0.4]]), {"label": batch["label"]}
    wanted = denoisers.guided(mixture, 2.0, {"label": 2})(x, jnp.ones(2), cond)
    examples = {"x0": x, "sigma": jnp.ones(2), "cond": cond}
    np.testing.assert_allclose(networks.anchor(x, examples), wanted, rtol=1e-6)


# ------------------------------------------------------------------------------------------ sampling, levels, errors


@pytest.mark.parametrize("nfe", [1, 2, 4])
def test_samples_are_jumps_along_the_grid(nfe):
    method = make("meanflow", timestamps=nfe + 1)
    noise = jax.random.normal(jax.random.key(1), (5, 2))
    found = method.sample({"v": jnp.float32(0)}, noise)
    np.testing.assert_allclose(found, flow_maps.jump(EXACT, 80 * noise, 80.0, 0.0), rtol=1e-4, atol=1e-5)
    denoised = method.denoiser({"v": jnp.float32(0)})(noise, jnp.full(5, 2.0))
    np.testing.assert_allclose(denoised, TEACHER(noise, 2.0), rtol=1e-4)


def test_levels_are_drawn_as_published():
    options = meanflow.Options(mean=-0.6, std=1.6, tau_mean=-4.0, tau_std=1.6, diagonal=0.25, sigma_min=1e-9)
    levels = flow_targets.draw_pairs(options)(jax.random.key(0), 100_000, jnp.int32(0))[0]
    sigma, tau = np.asarray(levels["sigma"]), np.asarray(levels["tau"])
    assert (tau <= sigma).all() and sigma.max() <= 80.0
    np.testing.assert_allclose([np.log(sigma).mean(), np.log(sigma).std()], [-0.6, 1.6], atol=0.02)
    below = 0.5 * (1 + math.erf(3.4 / (1.6 * math.sqrt(2) * math.sqrt(2))))  # P(tau < sigma) of the two draws
    np.testing.assert_allclose((tau == sigma).mean(), 0.25 + 0.75 * (1 - below), atol=0.01)
    ordered = dataclasses.replace(options, order="sort", tau_mean=-0.6, diagonal=0.0)
    levels = flow_targets.draw_pairs(ordered)(jax.random.key(0), 100_000, jnp.int32(0))[0]
    assert (levels["tau"] <= levels["sigma"]).all()
    spread = 1.6 / math.sqrt(math.pi)  # of the larger of two normal draws from their mean
    found = [np.log(levels[name]).mean() for name in ("sigma", "tau")]
    np.testing.assert_allclose(found, [-0.6 + spread, -0.6 - spread], atol=0.03)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("meanflow", {"order": "max"}, "order of sigma and tau"),
        ("meanflow", {"diagonal": 1.5}, r"diagonal.*\[0, 1\], got 1.5"),
        ("meanflow", {"derivative": "vjp"}, "derivative.*jvp, difference"),
        ("meanflow", {"cond_dropout": 0.1}, "without a teacher"),
        ("meanflow", {"distil": False}, "distil=True"),
        ("meanflow", {"guidance": 2.0}, "conditioned on classes or text"),
        ("trajectory", {"distil": False}, r"trajectory\.distil=True"),
        ("trajectory", {"substeps": 0}, "substeps >= 1"),
        ("scm", {"normalize": -1.0}, "normalize >= 0"),
        ("facm", {"sigma_min": 90.0}, "0 < sigma_min < sigma_max"),
        ("shortcut", {"model": models.MLP(channels=2)}, r"scalars=\('tau',\)"),
    ],
)
def test_options_that_cannot_be(name, options, message):
    with pytest.raises(ValueError, match=message):
        make(name, **options)


def test_samples_that_a_flow_map_cannot_make(default_sample):
    good = {"solver": "euler", "final_denoise": False, "timestamps": 3}
    flow_map.check_jumps(meanflow.Options(), default_sample(**good))
    for change in ({"solver": "heun"}, {"final_denoise": True}, {"timestamps": 1}, {"guidance": 2.0}, {"afs": True}):
        with pytest.raises(ValueError, match="a flow map needs"):
            flow_map.check_jumps(meanflow.Options(), default_sample(**{**good, **change}))
    with pytest.raises(ValueError, match=r"sigma_max=80\.0"):
        flow_map.check_jumps(meanflow.Options(), default_sample(**good, sigma_max=100.0))


@pytest.fixture
def default_sample():
    from jaxdiff.configs import default

    def sample(**changes):
        section = default.get_config().sample
        section.update(changes)
        return section

    return sample


# ------------------------------------------------------------------------------------------ a mixture


def mixture_run(name, steps=3000, **options):
    """Mean distance of one jump to the end of the teacher's trajectory, before and after training."""
    mixture = denoisers.gaussian_mixture(np.array([[-1.0, 0.4], [0.8, -0.6]]), 0.3)
    start = 8.0
    model = models.MLP(channels=2, width=64, depth=3, scalars=("tau",))
    optimizer = optax.adam(optax.cosine_decay_schedule(2e-3, steps))
    grid = lambda n: solvers.grid(n, 0.002, start)  # noqa: E731
    solve = lambda d, z, cond, key: d(start * z, start, cond)  # noqa: E731
    given = {"distil": True, "sigma_max": start, "grid": grid, "solve": solve, "timestamps": 2, **options}
    method = build_method(RULES[name], model, optimizer, analytic=mixture, convention=denoisers.edm, **given)

    @jax.jit
    def run(key):
        first, second = jax.random.split(key)
        means = jnp.array([[-1.0, 0.4], [0.8, -0.6]])[jax.random.bernoulli(first, 0.5, (steps, 256)).astype(int)]
        batches = means + 0.3 * jax.random.normal(second, means.shape)
        state = method.init(key, {"image": batches[0]}, {"teacher": {}})
        keys = jax.random.split(jax.random.fold_in(key, 1), steps)
        return state, jax.lax.scan(lambda s, e: method.step(s, {"image": e[0]}, e[1]), state, (batches, keys))[0]

    z = jax.random.normal(jax.random.key(8), (500, 2))
    ends = solvers.solve(mixture, start * z, solvers.grid(128, 0.002, start), "heun", final_denoise=True)
    return [float(jnp.abs(method.sample(s.params["student"], z) - ends).mean()) for s in run(jax.random.key(2))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), [("shortcut", 0.1), ("meanflow", 0.17), ("trajectory", 0.25)])
def test_one_jump_learns_the_end_of_the_trajectory(name, share):
    """What is left of the distance: 0.042, 0.126 and 0.186 on one machine."""
    before, after = mixture_run(name)
    assert after < share * before, (before, after)


# ------------------------------------------------------------------------------------------ runs


@pytest.mark.parametrize("name", RULES)
def test_a_step_lowers_for_tpu(name):
    run, mesh = prepare(config_of(images_of(name)), jax.devices()[:1])
    whole = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # noqa: E731
    given = jax.tree.map(whole, (declare(run, mesh), run.select(run.data.batch(0, 16))))
    made = jax.export.export(jax.jit(run.method.step), platforms=["tpu"])(*given, jax.random.key(0))
    assert made.platforms == ("tpu",) and "stablehlo.dot_general" in made.mlir_module()


def test_a_student_starts_as_its_teacher_and_is_sampled_without_it(tmp_path):
    """From a run without tau: the same function at every tau; then `nfe` of its own, in a workdir that was moved."""
    quick = {"train.steps": 2, "sample.count": 0}
    one = jax.devices()[:1]
    train(config_of(points_of("diffusion"), quick), tmp_path / "teacher", quiet=True, devices=one)
    teacher = load(tmp_path / "teacher", devices=one)
    x, cond = jax.random.normal(jax.random.key(0), (3, 2)), {"label": jnp.array([0, 1, 2])}
    wanted = teacher.denoiser(x, 0.7, cond)
    config = student_config(teacher.config, "meanflow", "1", "run", str(tmp_path / "teacher"))
    with config.unlocked():
        config.update_from_flattened_dict({**quick, "optim.learning_rate": 0.0, "ema.kind": "constant"})
    train(config, tmp_path / "student", quiet=True, devices=one)
    shutil.rmtree(tmp_path / "teacher")
    (tmp_path / "student").rename(tmp_path / "moved")
    saved = load(tmp_path / "moved", devices=one)
    assert (saved.run.nfe, saved.with_nfe(3).run.nfe) == (1, 3)
    assert np.isfinite(saved.sample(0, 4)).all() and np.isfinite(saved.sample(0, 4, nfe=2)).all()
    np.testing.assert_allclose(saved.denoiser(x, 0.7, cond), wanted, rtol=1e-5)


def test_every_rule_is_registered_with_a_recipe():
    for name, module in RULES.items():
        entry = METHODS[name]
        assert entry.build is module.build and entry.recipe is not None and entry.data
        assert entry.teacher(module.Options(distil=True))
