"""SFD against closed forms and a plain loop: targets, walks, updates, conditions, losses, the second stage."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from method_parts import build_method

from jaxdiff import denoisers, methods, models, solvers
from jaxdiff.conditions import Conditions, label_signal
from jaxdiff.methods import Frozen, Teacher, averaging, exported, sfd
from jaxdiff.methods.method import default_grid, draw_labels, init_from_teacher
from jaxdiff.methods.sfd_losses import LOSSES, make_loss
from jaxdiff.methods.sfd_schedule import make_schedule, teacher_states

GAUSSIAN = denoisers.gaussian(0.3, 0.5)
START = jnp.array([[80.0], [-40.0], [24.3]])
# the published study's values for N(0.3, 0.5^2): teacher states at the student's timestamps, student's states
TARGETS = [(11.19887482, -5.21097435, 3.58196983), (1.12387586, -0.11658968, 0.54809311),
           (0.88071143, 0.00636549, 0.47486919)]  # fmt: skip
WALK = [(10.93469299, -5.46734649, 3.32141300), (0.97267840, -0.06480314, 0.49111405),
        (0.54454253, 0.16738108, 0.36947676)]  # fmt: skip


class Affine(nn.Module):
    """D = a x + b + c step, with one number for each label; dropout on request."""

    num_classes: int = 0
    step_embed: str = ""
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, noise_label, cond=None, *, deterministic=True):
        cond = cond or {}
        out = self.param("a", nn.initializers.constant(0.5), ()) * x + self.param(
            "b", nn.initializers.constant(0.1), ()
        )
        if self.num_classes:
            out = out + self.param("table", nn.initializers.zeros, (self.num_classes,))[cond["label"]][:, None]
        if self.step_embed:
            out = out + self.param("c", nn.initializers.zeros, ()) * cond["step"][:, None]
        return nn.Dropout(self.dropout, deterministic=deterministic)(out)


def bare(network):
    """The network is the denoiser."""
    return lambda x, sigma, cond=None: network(x, jnp.broadcast_to(sigma, x.shape[:1]), cond)


def make(model=None, optimizer=None, **options):
    options = {"convention": bare, "analytic": GAUSSIAN, "afs": True, **options}
    return build_method(sfd, model or Affine(), optimizer or optax.sgd(1e-3), **options)


def begin(method, batch, teacher=None):
    return method.init(jax.random.key(0), batch, {"teacher": teacher or {}})


def with_params(state, **params):
    """The state with these parameters of the student in place of its own."""
    return state.replace(params={"student": {**state.params["student"], **params}})


def points(count=5, **more):
    return {"image": jnp.zeros((count, 1)), **more}


def noise_of(key, shape):
    """The iteration's own draw of eps."""
    return jax.random.normal(jax.random.split(key, 4)[1], shape)


# ------------------------------------------------------------------------------------------ closed forms


def test_targets_are_the_published_ones():
    solver = solvers.dpmpp3m()
    plan, grids = make_schedule((4,), default_grid, 4, solver)
    np.testing.assert_allclose(grids[4], [80, 10.929297, 0.669886, 0.006], rtol=1e-6)
    found = teacher_states(GAUSSIAN, START, jax.tree.map(lambda a: a[0], plan.teacher), 3, solver)
    np.testing.assert_allclose(found[..., 0], TARGETS, rtol=2e-6, atol=1e-6)


def test_student_walks_the_published_states():
    method = make(convention=lambda network: GAUSSIAN)
    state = begin(method, points(3))
    np.testing.assert_allclose(method.sample(exported(state), START / 80)[:, 0], WALK[-1], rtol=1e-5)
    states = solvers.solve(GAUSSIAN, START, default_grid(4), "euler", afs=True, trajectory=(1, 2, 3))
    np.testing.assert_allclose(states[..., 0], WALK, rtol=1e-5)


@pytest.mark.parametrize("solver", ["euler", "heun", "dpm2", "ipndm", "dpmpp2m", "dpmpp3m", "unipc"])
@pytest.mark.parametrize("afs", [False, True])
def test_targets_of_a_padded_plan_are_those_of_solve(solver, afs):
    chosen = solvers.make(solver)
    plan, grids = make_schedule((6, 4, 7), default_grid, 3, chosen)
    run = jax.jit(lambda rows, count: teacher_states(GAUSSIAN, START, rows, count, chosen, None, afs))
    for i, n in enumerate(plan.timestamps):
        fine = default_grid(3 * (n - 1) + 1)
        kept = range(3, 3 * (n - 1) + 1, 3)
        wanted = solvers.solve(GAUSSIAN, START, fine, solver, afs=afs, trajectory=kept)
        found = run(jax.tree.map(lambda a, i=i: a[i], plan.teacher), jnp.int32(n - 1))
        np.testing.assert_allclose(found[: n - 1], wanted, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(fine[::3], grids[n])
        assert found.shape[0] == 6


def test_evaluations_are_those_of_the_drawn_number_and_no_more():
    calls = []

    def counted(name, denoise):
        def call(x, sigma, cond=None):
            jax.debug.callback(lambda: calls.append(name))
            return denoise(x, sigma, cond)

        return call

    method = make(
        convention=lambda network: counted("student", bare(network)),
        analytic=counted("teacher", GAUSSIAN),
        nfe=(1, 2, 4),
        substeps=3,
    )
    state, step, seen = begin(method, points()), jax.jit(method.step), set()
    for i in range(12):
        calls.clear()
        _, metrics = jax.block_until_ready(step(state, points(), jax.random.key(i)))
        jax.effects_barrier()
        nfe = int(metrics["nfe"])
        assert (calls.count("student"), calls.count("teacher")) == (nfe, 3 * (nfe + 1))
        seen.add(nfe)
    assert seen == {1, 2, 4} and step._cache_size() == 1


# ------------------------------------------------------------------------------------------ iteration 0


@pytest.fixture(scope="module")
def unet():
    """A tiny UNet with random parameters, as a teacher."""
    model = models.UNet(resolution=8, channels=1, width=8, channel_mult=(1, 2), blocks=1, attention=(4,), num_classes=3)
    x, cond = jnp.zeros((2, 8, 8, 1)), {"label": jnp.zeros(2, jnp.int32)}
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), x, jnp.ones(2), cond))["params"]
    rng = np.random.default_rng(0)
    return model, jax.tree.map(lambda s: jnp.asarray(0.2 * rng.normal(size=s.shape), jnp.float32), shapes)


def student_of(model, step_embed, teacher, **options):
    """A UNet student and its state before training, its fresh arrays drawn without compiling an initialiser."""
    model = model.clone(step_embed=step_embed)
    method = build_method(sfd, model, optax.adam(1e-3), afs=True, **options)
    batch = {"image": jnp.zeros((4, 8, 8, 1)), "label": jnp.zeros(4, jnp.int32)}
    abstract = jax.eval_shape(method.init, jax.random.key(0), batch, {"teacher": teacher})
    rng = np.random.default_rng(1)

    def fill(path, leaf):
        zero = "affine_step" in jax.tree_util.keystr(path)
        return jnp.asarray(0.2 * rng.normal(size=leaf.shape) * (not zero), jnp.float32)

    params = init_from_teacher(jax.tree_util.tree_map_with_path(fill, abstract.params["student"]), teacher)
    held = {"params": {"student": params}, "opt_state": {"student": optax.adam(1e-3).init(params)}}
    return method, abstract.replace(step=jnp.int32(0), **held, frozen={"teacher": teacher})


@pytest.mark.parametrize("step_embed", [pytest.param("", marks=pytest.mark.slow), "zero"])
def test_before_training_the_student_is_the_teachers_euler_walk(unet, step_embed):
    model, teacher = unet
    method, state = student_of(model, step_embed, teacher, nfe=(1, 2))
    unit, cond = jax.random.normal(jax.random.key(3), (4, 8, 8, 1)), {"label": jnp.array([0, 1, 2, 3])}
    denoise = denoisers.edm(models.bind(model, teacher))
    walk = jax.jit(lambda unit, grid: solvers.solve(denoise, 80 * unit, grid, "euler", cond, afs=True))
    sample = jax.jit(method.sample, static_argnames="nfe")
    for nfe in (1, 2):
        wanted = walk(unit, default_grid(nfe + 2))
        np.testing.assert_allclose(sample(exported(state), unit, cond, nfe=nfe), wanted, atol=1e-6)


def test_the_step_lowers_for_tpu_and_cuda(unet):
    model, teacher = unet
    method, state = student_of(model, "zero", teacher, nfe=(1, 2), substeps=2)
    batch = {"image": jnp.zeros((4, 8, 8, 1)), "label": jnp.zeros(4, jnp.int32)}
    exported = jax.export.export(jax.jit(method.step), platforms=["tpu", "cuda"])(state, batch, jax.random.key(1))
    assert "stablehlo.convolution" in exported.mlir_module()


# ------------------------------------------------------------------------------------------ updates


def plain_iteration(optimizer, params, opt_state, x, targets, grid, afs, detach=True):
    """The same iteration as a loop over the equations, L1, without scan, table or plan."""
    gradients = []
    first = x

    def walk(params, upto):
        x = first
        for k in range(upto + 1):
            t, s = grid[k], grid[k + 1]
            d = x / jnp.sqrt(1 + t**2) if afs and k == 0 else (x - (params["a"] * x + params["b"])) / t
            x = x + (s - t) * d
        return x

    for k in range(len(grid) - 1):
        t, s = grid[k], grid[k + 1]
        if afs and k == 0:
            x = x + (s - t) * x / jnp.sqrt(1 + t**2)
            continue

        def loss(params, x=x, t=t, s=s, k=k):
            after = x + (s - t) * (x - (params["a"] * x + params["b"])) / t if detach else walk(params, k)
            return jnp.abs(after - targets[k]).sum() / len(x), after

        (_, after), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        gradients.append(gradient)
        with jax.numpy_dtype_promotion("standard"):  # optax counts on it
            updates, opt_state = optimizer.update(gradient, opt_state, params)
        params, x = optax.apply_updates(params, updates), after
    return params, opt_state, gradients


@pytest.mark.parametrize("afs", [False, True])
def test_one_update_a_step_without_gradient_between_steps(afs):
    optimizer = optax.adam(1e-2)
    method = make(optimizer=optimizer, nfe=(3,), afs=afs)
    state, key = begin(method, points()), jax.random.key(7)
    after, metrics = jax.jit(method.step)(state, points(), key)
    grid = default_grid(4 + afs)
    x = 80 * noise_of(key, (5, 1))
    targets = solvers.solve(
        GAUSSIAN, x, default_grid(4 * len(grid) - 3), "dpmpp3m", trajectory=range(4, 4 * len(grid) - 3, 4)
    )
    params, opt_state, gradients = plain_iteration(
        optimizer, state.params["student"], state.opt_state["student"], x, targets, grid, afs
    )
    for found, wanted in zip(
        jax.tree.leaves((after.params["student"], after.opt_state["student"])),
        jax.tree.leaves((params, opt_state)),
        strict=True,
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], np.mean([optax.tree.norm(g) for g in gradients]), rtol=1e-4)
    assert int(after.opt_state["student"][0].count) == 3  # three evaluations trained; the analytic step left Adam alone
    assert len(gradients) == 3
    _, _, crossing = plain_iteration(
        optimizer, state.params["student"], state.opt_state["student"], x, targets, grid, afs, detach=False
    )
    assert abs(float(crossing[-1]["a"] - gradients[-1]["a"])) > 0.1  # a gradient through the walk would be another


def test_moments_after_mixed_walks_count_trained_steps_only():
    method = make(optimizer=optax.adam(1e-3), nfe=(1, 2, 3))
    state, trained = begin(method, points()), 0
    step = jax.jit(method.step)
    for i in range(8):
        state, metrics = step(state, points(), jax.random.key(i))
        trained += int(metrics["nfe"])
        assert int(state.opt_state["student"][0].count) == trained
    assert int(state.step) == 8


def test_learning_rate_falls_by_iterations_not_updates():
    method = make(nfe=(3,), factor=lambda iteration: jnp.where(iteration < 2, 1.0, 0.1))
    step, key = jax.jit(method.step), jax.random.key(0)
    state = begin(method, points())
    full = step(state, points(), key)[0].params["student"]["b"] - state.params["student"]["b"]
    late = (
        step(state.replace(step=jnp.int32(2)), points(), key)[0].params["student"]["b"] - state.params["student"]["b"]
    )
    early = (
        step(state.replace(step=jnp.int32(1)), points(), key)[0].params["student"]["b"] - state.params["student"]["b"]
    )
    assert float(early) == float(full)
    # L1 on an affine student: b's gradient is a sum of signs, which these small updates do not flip
    np.testing.assert_allclose(late, 0.1 * full, rtol=0.02)


def test_accumulated_gradients_equal_those_of_the_whole_batch():
    one, three = (make(nfe=(2,), loss="l2", accum_steps=parts) for parts in (1, 3))
    state, key = begin(one, points(6)), jax.random.key(2)
    wanted, values = jax.jit(one.step)(state, points(6), key)
    found, metrics = jax.jit(three.step)(state, points(6), key)
    for a, b in zip(
        jax.tree.leaves((found.params["student"], metrics)),
        jax.tree.leaves((wanted.params["student"], values)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4)


def test_an_average_is_kept_on_request_and_sampled():
    method = make(nfe=(1,), average=True, decay=averaging.constant(0.9))
    state = begin(method, points())
    after, _ = jax.jit(method.step)(state, points(), jax.random.key(0))
    average = 0.9 * state.params["student"]["b"] + 0.1 * after.params["student"]["b"]
    np.testing.assert_allclose(after.averages["ema"]["b"], average, rtol=1e-6)
    assert exported(after) is after.averages["ema"]
    unit = jax.random.normal(jax.random.key(1), (3, 1))
    other = make(nfe=(1,)).sample(after.averages["ema"], unit)
    np.testing.assert_array_equal(method.sample(exported(after), unit), other)
    assert begin(make(), points()).averages == {}


def test_student_reaches_an_exact_teacher():
    """Two evaluations of an MLP against the exact denoiser of a mixture: the gap of end states falls tenfold."""
    rng = np.random.default_rng(0)
    mixture = denoisers.gaussian_mixture(rng.normal(size=(6, 2)), np.full(6, 0.1), np.full(6, 1 / 6))
    method = make(
        models.MLP(width=64, depth=2),
        optax.adam(2e-3),
        convention=denoisers.edm,
        analytic=mixture,
        factor=lambda iteration: jnp.where(iteration < 500, 1.0, 0.1),
    )
    batch, unit = {"image": jnp.zeros((256, 2))}, jax.random.normal(jax.random.key(9), (1000, 2))
    ends = solvers.solve(mixture, 80 * unit, default_grid(13), "dpmpp3m")
    state = begin(method, batch)

    def error(state):
        return float(jnp.abs(method.sample(exported(state), unit) - ends).mean())

    before = error(state)
    step = jax.jit(method.step, donate_argnums=0)
    for i in range(700):
        state, _ = step(state, batch, jax.random.fold_in(jax.random.key(1), i))
    assert before > 10 * error(state)


# ------------------------------------------------------------------------------------------ conditions


def test_walks_are_drawn_uniformly_and_the_same_for_everyone():
    method = make(nfe=(1, 2, 3, 4), substeps=1)
    state, step = begin(method, points()), jax.jit(method.step)
    drawn = np.array([int(step(state, points(), jax.random.key(i))[1]["nfe"]) for i in range(200)])
    counts = np.bincount(drawn, minlength=5)[1:]
    assert (abs(counts - 50) < 25).all()  # four standard deviations
    other = state.replace(params=jax.tree.map(lambda p: p + 1, state.params), step=jnp.int32(9))
    again = [int(step(other, points(), jax.random.key(i))[1]["nfe"]) for i in range(20)]
    assert again == list(drawn[:20])  # the key alone decides, and it is the same in every process


@pytest.mark.parametrize("condition", ["steps", "next"])
def test_the_student_is_conditioned_on_its_steps(condition):
    method = make(Affine(step_embed="zero"), nfe=(2, 3), condition=condition)
    state = begin(method, points())
    state = with_params(state, a=jnp.float32(0), b=jnp.float32(0), c=jnp.float32(1))
    unit = jax.random.normal(jax.random.key(0), (2, 1))
    for nfe in (2, 3):
        grid = default_grid(nfe + 2)
        x = np.asarray(80 * unit)
        for k, (t, s) in enumerate(pairwise(grid)):
            step = nfe + 2 if condition == "steps" else np.log(s) / 4
            d = x / np.sqrt(1 + t**2) if k == 0 else (x - step) / t
            x = x + (s - t) * d
        np.testing.assert_allclose(method.sample(exported(state), unit, nfe=nfe), x, rtol=1e-4, atol=1e-5)


def test_training_and_sampling_condition_the_student_alike():
    """After one SGD step from c = 0 the gradient of c is the sum of the step conditions, times the sign and 1 - s/t."""
    for condition in ("steps", "next"):
        method = make(Affine(step_embed="zero"), nfe=(1,), condition=condition)
        state, key = begin(method, points()), jax.random.key(4)
        after, _ = jax.jit(method.step)(state, points(), key)
        s = default_grid(3)[2]
        step = 3.0 if condition == "steps" else np.log(s) / 4
        ratio = (after.params["student"]["c"] - state.params["student"]["c"]) / (
            after.params["student"]["b"] - state.params["student"]["b"]
        )
        np.testing.assert_allclose(ratio, step, rtol=1e-4)


def test_labels_are_drawn_uniformly_and_other_conditions_kept():
    cond = {"label": jnp.zeros(3000, jnp.int32), "pooled": jnp.ones((3000, 2))}
    drawn = draw_labels(jax.random.key(0), cond, Conditions({"label": label_signal(3)}), 3000)
    np.testing.assert_allclose(np.bincount(drawn["label"]), 1000, atol=4 * np.sqrt(3000 * 2 / 9))
    assert drawn["pooled"] is cond["pooled"]
    assert draw_labels(jax.random.key(0), None, Conditions(), 3) is None
    method = make(Affine(num_classes=3), nfe=(1,), analytic=denoisers.gaussian(0.0, 1.0))
    state = begin(method, points(label=jnp.zeros(5, jnp.int32)))
    after, _ = jax.jit(method.step)(state, points(64, label=jnp.zeros(64, jnp.int32)), jax.random.key(0))
    assert (
        np.asarray(after.params["student"]["table"]) != 0
    ).all()  # every class was seen, though the batch holds only one


def test_guidance_inside_training_guides_the_teacher_and_outside_the_student():
    mixture = denoisers.gaussian_mixture(np.array([[-1.0], [1.0]]), np.array([0.3, 0.3]), np.array([0.5, 0.5]))
    null = {"label": 2}
    method = make(Affine(num_classes=2), nfe=(1,), analytic=mixture, guidance=3.0, null=null)
    state, key = begin(method, points(label=jnp.zeros(5, jnp.int32))), jax.random.key(0)
    _, metrics = jax.jit(method.step)(state, points(label=jnp.zeros(5, jnp.int32)), key)
    drawn, unit = {"label": jax.random.randint(jax.random.split(key, 4)[2], (5,), 0, 2)}, noise_of(key, (5, 1))
    ends = [
        solvers.solve(denoise, 80 * unit, default_grid(9), "dpmpp3m", drawn)
        for denoise in (denoisers.guided(mixture, 3.0, null), mixture)
    ]
    gaps = [float(jnp.abs(method.sample(exported(state), unit, drawn) - end).mean()) for end in ends]
    assert float(metrics["end_distance"]) == pytest.approx(gaps[0], rel=1e-4) and abs(gaps[0] - gaps[1]) > 1e-3
    plain = make(Affine(num_classes=3), nfe=(1,), null=null)
    guided = make(Affine(num_classes=3), nfe=(1,), null=null, sampling_guidance=2.0)
    state = begin(plain, points(label=jnp.zeros(5, jnp.int32)))
    state = with_params(state, table=jnp.array([0.5, 0.2, 0.1]))
    unit, zero = jnp.ones((2, 1)), {"label": jnp.zeros(2, jnp.int32)}
    pull = 1 - default_grid(3)[2] / default_grid(3)[1]  # of D on the last state
    difference = guided.sample(exported(state), unit, zero) - plain.sample(exported(state), unit, zero)
    np.testing.assert_allclose(difference, pull * (0.5 - 0.1), rtol=1e-4)


def test_slices_of_an_accumulated_batch_drop_differently():
    """With one mask for all, the gradients of equal examples would be equal, and their mean have few values."""
    seen = []

    class Watched(Affine):
        @nn.compact
        def __call__(self, x, noise_label, cond=None, *, deterministic=True):
            kept = nn.Dropout(0.5, deterministic=deterministic)(jnp.ones(8))
            jax.debug.callback(lambda kept: seen.append(tuple(np.asarray(kept))), kept)
            return x * self.param("a", nn.initializers.ones, ())

    method = make(Watched(), nfe=(1,), accum_steps=3)
    state = begin(method, points(6))
    seen.clear()
    jax.block_until_ready(jax.jit(method.step)(state, points(6), jax.random.key(0)))
    jax.effects_barrier()
    assert len(set(seen)) == 3


def test_half_precision_is_the_networks_alone():
    model = models.MLP(channels=1, width=8, depth=1, step_embed="zero", dtype=jnp.bfloat16)
    method = make(model, optax.adam(1e-3), convention=denoisers.edm, nfe=(1, 2))
    with jax.numpy_dtype_promotion("standard"):
        state = begin(method, points())
        after, metrics = jax.eval_shape(method.step, state, points(), jax.random.key(0))
        images = jax.eval_shape(method.sample, exported(state), jnp.zeros((2, 1)))
    floats = [leaf.dtype for leaf in jax.tree.leaves((after, metrics, images)) if leaf.dtype != jnp.int32]
    assert set(floats) == {jnp.dtype("float32")}


def test_a_student_can_be_differentiated_forwards(unet):
    model, teacher = unet
    method, state = student_of(model, "", teacher)
    x, cond = jnp.ones((1, 8, 8, 1)), {"label": jnp.zeros(1, jnp.int32)}
    both = jax.eval_shape(lambda x: jax.jvp(lambda x: method.denoiser(exported(state))(x, 1.0, cond), (x,), (x,)), x)
    assert [part.shape for part in both] == [x.shape, x.shape]


def test_dropout_is_a_flag():
    on, off = (make(Affine(dropout=0.5), nfe=(1,), dropout=flag) for flag in (True, False))
    without = make(Affine(), nfe=(1,))
    state, key = begin(off, points(64)), jax.random.key(0)
    losses = [float(jax.jit(m.step)(state, points(64), key)[1]["loss"]) for m in (on, off, without)]
    assert losses[1] == losses[2] != losses[0]


# ------------------------------------------------------------------------------------------ second stage


def test_the_second_stage_learns_the_first_students_own_walk():
    first = make(Affine(step_embed="zero"), nfe=(2, 5))
    state = begin(first, points())
    state = with_params(state, a=jnp.float32(0.3), b=jnp.float32(0.2), c=jnp.float32(0.05))
    teacher = exported(state)
    second = make(
        Affine(step_embed="zero"), optax.sgd(0.0), analytic=None, nfe=(1,), substeps=3, solver="euler",
        teacher_afs=True, teacher_step=7,
    )  # fmt: skip
    begun, key = begin(second, points(), teacher), jax.random.key(6)
    assert jax.tree.all(jax.tree.map(np.array_equal, begun.params["student"], teacher))
    _, metrics = jax.jit(second.step)(begun, points(), key)
    unit = noise_of(key, (5, 1))
    gap = np.abs(second.sample(exported(begun), unit) - first.sample(exported(state), unit, nfe=5)).mean()
    np.testing.assert_allclose(metrics["end_distance"], gap, rtol=1e-4)
    assert gap > 1e-3


# ------------------------------------------------------------------------------------------ losses and errors


def test_losses():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 3, 4, 4, 2)).astype(np.float32)
    difference = (a - b).reshape(3, -1).astype(np.float64)
    c = 0.00054 * np.sqrt(32)
    wanted = {
        "l1": np.abs(difference).sum(1),
        "l2": (difference**2).sum(1),
        "pseudo_huber": np.sqrt((difference**2).sum(1) + c**2) - c,
    }
    assert set(wanted) == set(LOSSES)
    for name, value in wanted.items():
        np.testing.assert_allclose(make_loss(name)({}, jnp.asarray(a), jnp.asarray(b), False), value, rtol=1e-5)

    def perceptual(params, a, b):
        return params * jnp.abs(a - b).max((1, 2, 3))

    both = make_loss("l1+lpips", perceptual)({"lpips": 2.0}, jnp.asarray(a), jnp.asarray(b), True)
    np.testing.assert_allclose(both, wanted["l1"] + 32 * 2 * np.abs(difference).max(1), rtol=1e-5)
    early = make_loss("l1+lpips", perceptual)({"lpips": 2.0}, jnp.asarray(a), jnp.asarray(b), False)
    np.testing.assert_allclose(early, wanted["l1"], rtol=1e-5)
    alone = make_loss("lpips", perceptual)({"lpips": 2.0}, jnp.asarray(a), jnp.asarray(b), False)
    np.testing.assert_allclose(alone, 32 * 2 * np.abs(difference).max(1), rtol=1e-5)


@pytest.mark.parametrize("nfe", [(3,), (1, 3)])
def test_lpips_in_a_sum_is_seen_by_the_last_step_alone(nfe):
    """A constant distance of 7 raises the mean loss of a walk by 7 / its steps, as in the authors' code."""
    found = {}
    for loss in ("l1", "l1+lpips"):
        method = make(nfe=nfe, loss=loss, optimizer=optax.sgd(0.0), perceptual=lambda params, a, b: 7 + 0 * a[:, 0])
        state = begin(method, points())
        state = state.replace(frozen={**state.frozen, "lpips": {}})
        found[loss] = [jax.jit(method.step)(state, points(), jax.random.key(i))[1] for i in range(4)]
    for plain, both in zip(*found.values(), strict=True):
        np.testing.assert_allclose(both["loss"] - plain["loss"], 7 / plain["nfe"], rtol=1e-4)


def test_the_rate_drops_at_the_authors_iteration():
    """Their loop lowers it at the end of an iteration that began with half of the trajectories seen, for the next."""
    from jaxdiff.configs import cifar10_sfd
    from jaxdiff.training.components import optimizers_of

    config = cifar10_sfd.get_config("2")
    seen, rate, first = 0, 1.0, None
    for iteration in range(config.train.steps):
        if rate == 0.1 and first is None:
            first = iteration
        if seen >= 100_000:
            rate = 0.1
        seen += 128
    factor = optimizers_of(config, models.MLP()).factor
    assert float(factor(jnp.int32(first - 1))) == 1.0 and float(factor(jnp.int32(first))) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nfe": ()}, r"nfe .*got \(\)"),
        ({"nfe": (2, 2)}, r"nfe .*got \(2, 2\)"),
        ({"nfe": (0,)}, "at least 1"),
        ({"substeps": 0}, r"substeps \(K\).* must be at least 1, got 0"),
        ({"solver": "ancestral"}, "must be deterministic"),
        ({"solver": "hein"}, "did you mean 'heun'"),
        ({"loss": "l3"}, "unknown SFD loss .* 'l3'"),
        ({"condition": "step"}, "unknown SFD condition 'step'"),
        ({"timestamps": 7}, "2 evaluations, got 5"),
        ({"grid": lambda n: np.linspace(2.0, 1.0, n) ** (1 + 1 / n)}, "does not contain the student's"),
        ({"analytic": None, "teacher_step": 13}, "the model has no step_embed"),
        ({"teacher_step": 7}, r"7 timestamps .*13"),
        ({"guidance": 2.0}, "guidance=2.0 needs a network"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_a_perceptual_loss_needs_its_weights():
    with pytest.raises(ValueError, match="needs LPIPS weights"):
        make_loss("l1+lpips")
    method = make(models.UNet(resolution=8, channels=3), convention=denoisers.edm, loss="l1+lpips", shape=(8, 8, 3))
    with pytest.raises(ValueError, match=r"sfd\.lpips\.weights"):
        method.frozen["lpips"].load()


def test_sampling_with_other_evaluations_is_refused():
    method = make(nfe=(1, 2))
    with pytest.raises(ValueError, match="1, 2 evaluations, got 4"):
        method.sample(exported(begin(method, points())), jnp.zeros((1, 1)), nfe=4)


def test_a_teacher_that_does_not_fit_is_refused():
    method = make(analytic=None)
    with pytest.raises(ValueError, match=r"teacher.*1 mismatches \(w is unknown\)"):
        begin(method, points(), {"a": jnp.float32(1), "w": jnp.float32(1)})
    with pytest.raises(ValueError, match=r"a is \(2,\), expected \(\)"):
        begin(method, points(), {"a": jnp.ones(2)})
    state = begin(method, points(), {"a": jnp.float16(3)})
    assert float(state.params["student"]["a"]) == 3 and float(state.params["student"]["b"]) == pytest.approx(0.1)
    assert state.params["student"]["a"].dtype == jnp.float32


def test_a_teacher_of_another_architecture_and_a_start_of_ones_own():
    big = {"w": jnp.full(7, 0.5)}
    other = Teacher(lambda params: lambda x, sigma, cond=None: params["w"].mean() * x, Frozen(dict, dict), own=False)
    method = make(analytic=None, teacher=other)
    state = method.init(jax.random.key(0), points(), {"teacher": big, "student": {"b": jnp.float32(2)}})
    assert set(state.frozen) == {"teacher"} and float(state.params["student"]["b"]) == 2
    assert float(begin(method, points(), big).params["student"]["b"]) == pytest.approx(0.1)
    after, _ = jax.jit(method.step, donate_argnums=0)(state, points(), jax.random.key(0))
    assert float(big["w"].sum()) == 3.5  # what was given is not donated with the state
    np.testing.assert_array_equal(after.frozen["teacher"]["w"], 0.5)


def test_it_is_a_method_by_name():
    assert methods.METHODS["sfd"].build is sfd.build
