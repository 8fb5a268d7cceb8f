"""EMD: EM Distillation of a teacher into a one-step generator (Xie et al., NeurIPS 2024).

The generator g(z), z ~ N(0, I), is fitted by maximum likelihood to the teacher's noisy densities p_sigma. With
x = g(z) + sigma eps, p_g the density of x, D_T and D_S the denoisers of p_sigma and of p_g, the gradient is

    -grad KL(p_sigma | p_g) = E J_params(z)^T (x - g(z)) / sigma^2     over   rho(x, z) = p_sigma(x)/p_g(x) p(x|z) p(z)

E-step     K Langevin steps towards rho from a fresh (eps, z); a = gamma_eps, b = gamma_z, n and m unit normals,
           gap = D_T(x) - D_S(x), which is sigma^2 (score_T - score_S):
               eps <- eps + a (gap / sigma - eps) + sqrt(2a) n
               z   <- z   + b (J_z^T gap / sigma^2 - z) + sqrt(2b) m             both from the same (eps, z)
           or with x carried instead of eps, x = g(z) + sigma eps at the start and c = gamma_x / sigma^2:
               x   <- x   + c (gap - (x - g(z))) + sigma sqrt(2c) n
               z   <- z   + b (J_z^T (x - g(z)) / sigma^2 - z) + sqrt(2b) m
           or with z left where it is: four schemes "eps,z", "x,z", "eps", "x".
M-step     params <- params + rate weight(sigma) J_params(z)^T r,   r = x - g(z) = sigma eps after K steps, cleaned of
           noise. weight 1 is the paper's sigma^2 on the divergence.
noise      "complete": r without the noise of any step, each faded as the chain fades it; r then follows the same
           recursion with the same gaps and no n, and is zero when the densities agree. "last": without the last step's
           noise, which changes no expectation. "none". `cancel_initial` tells whether the first eps counts as noise.
score      D_S by denoising score matching on g(z), z from the prior, before each M-step.

K = 1 with z left alone and complete cancellation is Diff-Instruct (variational score distillation): r = a gap, the
gradient of the reverse divergence KL(p_g | p_sigma).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct
from jax import Array

from jaxdiff import denoisers
from jaxdiff.denoisers import Cond, Denoiser, per_example
from jaxdiff.errors import check_sigma, pick
from jaxdiff.methods import ema as ema_lib
from jaxdiff.methods.denoise import denoising_loss
from jaxdiff.methods.method import (
    Batch,
    Method,
    Metrics,
    accumulate,
    adopt,
    cond_of,
    data_of,
    draw_labels,
    in_loops,
    update,
)
from jaxdiff.models import network
from jaxdiff.noise.levels import Levels, Weight, edm_weight, lognormal
from jaxdiff.trees import path_name

Generator = Callable[[Array, Cond], Array]  # (z, cond) -> x0
SCHEMES = {"eps,z": 0, "x,z": 0, "eps": 0, "x": 0}
CHAINED = ("params", "score", "frozen")  # parts of the state that a chain evaluates
CANCEL = {"complete": 0, "last": 0, "none": 0}
DIFF_INSTRUCT: dict[str, Any] = {"steps": 1, "scheme": "eps", "step_eps": 1.0, "cancel": "complete"}


@struct.dataclass
class State:
    """Everything that must survive a restart."""

    step: Any  # generator updates done
    params: Any  # of the generator
    ema: Any
    opt_state: Any
    score: Any  # parameters of D_S
    score_opt_state: Any
    frozen: Any  # {"teacher": parameters}: held, never trained


# ------------------------------------------------------------------------------------------ the E-step


class Chain(NamedTuple):
    """Where K Langevin steps ended. Examples whose chain left the finite numbers are marked and put back to zero."""

    z: Array
    carried: Array  # sigma eps, or x
    residual: Array  # x - g(z), cleaned; in the schemes that carry x, x cleaned: g(z) is still to be subtracted
    finite: Array  # [b]
    metrics: Metrics


def e_step(
    teacher: Denoiser,
    student: Denoiser,
    generate: Generator,
    z: Array,
    eps: Array,
    sigma: Array,
    key: Array,
    cond: Cond = None,
    *,
    steps: int = 16,
    scheme: str = "eps,z",
    step_eps: float = 0.16,
    step_z: float = 1.6e-5,
    step_x: float = 0.0,
    cancel: str = "complete",
    cancel_initial: bool = True,
    half: bool = False,
    clip_z: float = 0.0,
    unroll: int = 1,
) -> Chain:
    """K Langevin steps on (eps, z) towards rho.

    `teacher` and `student` are denoisers of the two densities; `generate(z, cond)` is differentiated by z alone, once
    a step. sigma [b] is the noise level of each chain; `key` one key, or one for each, with which a chain does not
    depend on the others. Everything carried is float32; to a gradient taken outside, what is returned is constant.

    step_x     schemes with x: gamma_x; 0 = step_eps sigma^2, with which "x" equals "eps" step by step
    half       the other convention of Langevin steps, (gamma/2, sqrt(gamma)) instead of (gamma, sqrt(2 gamma))
    clip_z     bounds the root mean square of J_z^T(...) / sigma^2 in each example; 0 = off
    unroll     of the loop
    """
    check_chain(steps, scheme, step_eps, step_z, step_x, cancel)
    moving, in_x = scheme.endswith(",z"), scheme.startswith("x")
    z, eps, sigma = (jnp.asarray(a, jnp.float32) for a in (z, eps, sigma))
    level = per_example(sigma, z)
    rate = (0.5 if half else 1.0) * (step_x / level**2 if step_x else jnp.float32(step_eps))
    rate_z = (0.5 if half else 1.0) * step_z
    first = generate(z, cond)
    keys = key if key.ndim else jax.random.split(key, z.shape[0])

    def advance(carry: Any, index: Array) -> tuple[Any, Metrics]:
        at, z, clean = carry
        made, pull = jax.vjp(lambda z: generate(z, cond), z) if moving else (first, None)
        x, apart = (at, at - made) if in_x else (made + at, at)
        gap = teacher(x, sigma, cond) - student(x, sigma, cond)
        push = jnp.sqrt(2 * rate) * level * _normals(keys, 2 * index, at)
        after = at + rate * (gap - apart)
        kept = {
            "none": after + push,
            "last": after,
            "complete": clean + rate * (gap - (clean - made if in_x else clean)),
        }
        seen = {"score_gap": _mean_square(gap / level)}
        if pull is not None:
            (drift,) = pull(((apart if in_x else gap) / level**2).astype(made.dtype))
            if clip_z:
                drift *= jnp.minimum(1.0, clip_z / jnp.sqrt(per_example(_mean_square(drift), z) + 1e-20))
            z = z + rate_z * (drift - z) + jnp.sqrt(2 * rate_z) * _normals(keys, 2 * index + 1, z)
            seen["z_drift"] = _mean_square(rate_z * drift)
        return (after + push, z, kept[cancel]), seen

    at = first + level * eps if in_x else level * eps
    start = at if cancel != "complete" or not cancel_initial else first if in_x else jnp.zeros_like(at)
    (at, end, clean), seen = jax.lax.scan(advance, (at, z, start), jnp.arange(steps), unroll=unroll)
    at, end, clean = jax.lax.stop_gradient((at, end, clean))
    finite = jnp.isfinite(_mean_square(end) + _mean_square(clean) + _mean_square(at))
    end, clean, at = (jnp.where(per_example(finite, z), a, 0.0) for a in (end, clean, at))
    metrics = {name: jnp.sqrt(_mean_of(values.mean(0), finite)) for name, values in seen.items()}
    metrics |= {"z_square": _mean_of(_mean_square(end), finite), "nonfinite": 1 - finite.astype(jnp.float32).mean()}
    if not in_x:
        metrics |= {"eps_square": _mean_of(_mean_square(at / level), finite)}
        metrics |= {"residual": jnp.sqrt(_mean_of(_mean_square(clean / level), finite))}
    return Chain(end, at, clean, finite, metrics)


def check_chain(steps: int, scheme: str, step_eps: float, step_z: float, step_x: float, cancel: str) -> None:
    """What can be wrong with the arguments of a chain."""
    pick(SCHEMES, scheme, "EMD scheme")
    pick(CANCEL, cancel, "noise cancellation")
    if steps < 1:
        raise ValueError(f"a chain has at least one Langevin step, got steps={steps}")
    if not 0 < step_eps <= 1 or step_z < 0 or step_x < 0:
        raise ValueError(
            f"step_eps must be in (0, 1], step_z and step_x not negative, got {step_eps}, {step_z}, {step_x}; larger "
            "Langevin steps diverge"
        )
    if step_x and not scheme.startswith("x"):
        raise ValueError(f"step_x={step_x} is for the schemes that carry x, got scheme={scheme!r}; set step_eps")


def _normals(keys: Array, index: Array, like: Array) -> Array:
    """Unit normals, those of each example from its own key."""
    return jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, index), like.shape[1:]))(keys)


def _narrowed(params: Any, dtype: Any) -> Any:
    """Parameters with their kernels in `dtype`; the others are small, and norms and tables want their precision."""

    def narrow(path: Any, leaf: Array) -> Array:
        return leaf.astype(dtype) if path_name(path).endswith("kernel") else leaf

    return jax.tree_util.tree_map_with_path(narrow, params)


def _mean_square(x: Array) -> Array:
    return jnp.square(x).reshape(x.shape[0], -1).mean(1)


def _mean_of(values: Array, finite: Array) -> Array:
    return jnp.where(finite, values, 0.0).sum() / jnp.maximum(finite.astype(jnp.float32).sum(), 1.0)


# ------------------------------------------------------------------------------------------ the M-step


def m_step(
    generate: Callable[[Any, Array, Cond], Array],
    params: Any,
    chain: Chain,
    sigma: Array,
    cond: Cond = None,
    *,
    scheme: str = "eps,z",
    weight: Weight = jnp.ones_like,
) -> tuple[Array, Any]:
    """(loss, gradient) of mean weight(sigma) |target - g(z)|^2 / 2, the target what the chain says and constant.

    `generate(params, z, cond)` is run and pulled back once. Means are over pixels and examples.
    """
    made, pull = jax.vjp(lambda p: generate(p, chain.z, cond), params)
    residual = chain.residual - made if scheme.startswith("x") else chain.residual
    residual = jnp.where(per_example(chain.finite, made), residual, 0.0)
    weighted = per_example(weight(sigma), made) * residual
    (gradient,) = pull((-weighted / made.size).astype(made.dtype))
    return 0.5 * (weighted * residual).mean(), gradient


def correct(
    teacher: Denoiser,
    student: Denoiser,
    generate: Generator,
    z: Array,
    key: Array,
    cond: Cond = None,
    *,
    sigma: float,
    **chain: Any,
) -> tuple[Array, Array]:
    """Samples g(z), and what the teacher makes of x after a long joint chain from them at one noise level."""
    levels = jnp.full(z.shape[0], sigma, jnp.float32)
    keys = key if key.ndim else jax.random.split(key, z.shape[0])
    eps = _normals(keys, jnp.int32(-1), z)
    end = e_step(teacher, student, generate, z, eps, levels, keys, cond, **{**chain, "scheme": "eps,z"})
    return generate(z, cond), teacher(generate(end.z, cond) + end.carried, levels, cond)


# ------------------------------------------------------------------------------------------ the method


def emd(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    score_optimizer: optax.GradientTransformation | None = None,
    *,
    sigma_star: float = 20.0855,
    input_scale: str = "sigma",
    wrapper: Callable[..., Denoiser] = denoisers.edm,
    teacher: Callable[[Any], Denoiser] | None = None,
    guidance: float = 1.0,
    null: Cond = None,
    levels: Levels | None = None,
    weight: Weight = jnp.ones_like,
    score_levels: Levels | None = None,
    score_weight: Weight | None = None,
    score_updates: int = 1,
    dropout: bool = False,
    rate: Callable[[Array], Any] = lambda iteration: 1.0,
    decay: ema_lib.Decay | None = None,
    parts: int = 1,
    place: Callable[[Array], Array] = lambda x: x,
    unroll: int = 1,
    chain_dtype: Any = None,
    **chain: Any,
) -> Method:
    """Distil a teacher into g(z) = D(sigma_star z, sigma_star), D = wrapper(network) with the teacher's weights.

    `init(key, batch, frozen)` takes {"teacher": its parameters}; generator and D_S start from them. With an analytic
    teacher (`teacher=lambda _: denoise`, {"teacher": {}}) they start from {"student": parameters} or untrained. Of the
    batch only shapes and conditions other than labels are used. `chain` holds arguments of `e_step`: steps, scheme,
    step_eps, step_z, cancel, ...; `**DIFF_INSTRUCT` makes it Diff-Instruct.

    input_scale    "sigma": the network sees sigma_star z, a pure noise of its level; "one": sqrt(1 + sigma_star^2) z,
                   unit variance to a variance-preserving network
    levels         noise levels of the chains; score_levels, score_weight: of the score matching
    guidance       of the teacher; D_S and the generator see the condition alone
    score_updates  of D_S, before each update of the generator
    dropout        of D_S while it is trained; every network of a chain is deterministic
    rate           factor of both learning rates by iteration
    place          a sharding constraint for arrays drawn here, as in `sfd`
    unroll         of the chain's loop. On CPU, where XLA is slow at convolution gradients inside loops, a model without
                   a loop form (`layers.loop_conv`) wants unroll=steps
    chain_dtype    the chain runs copies of all networks in this dtype, their kernels stored in it: half the traffic and
                   communication of K evaluations. What is trained keeps its own
    """
    check_sigma(sigma_star)
    score_optimizer = score_optimizer or optimizer
    levels, score_levels = levels or lognormal(), score_levels or lognormal()
    score_weight, decay = score_weight or edm_weight(), decay or ema_lib.constant(0.0)
    scale = pick({"sigma": 1.0, "one": (1 + sigma_star**-2) ** 0.5}, input_scale, "input_scale of a generator")
    if score_updates < 1:
        raise ValueError(f"score_updates is at least 1, got {score_updates}: without its own score there is no gap")
    if guidance != 1.0 and not null:
        raise ValueError(f"guidance={guidance} needs null values, for example null={{'label': num_classes}}")
    defaults = {"steps": 16, "scheme": "eps,z", "step_eps": 0.16, "step_z": 1.6e-5, "step_x": 0.0, "cancel": "complete"}
    check_chain(**{name: chain.get(name, value) for name, value in defaults.items()})
    scheme, own = chain.get("scheme", "eps,z"), teacher is None
    looped = in_loops(model)  # for chains, and for D_S when it is updated in a loop
    if chain_dtype is not None and not hasattr(model, "dtype"):
        raise ValueError(f"chain_dtype={chain_dtype} is for networks with a dtype; {type(model).__name__} has none")

    def generate(params: Any, z: Array, cond: Cond = None, model: nn.Module = model) -> Array:
        return denoisers.one_step(wrapper(network(model, params)), sigma_star, scale)(z, cond)

    def densities(frozen: Any, score: Any, model: nn.Module = model) -> tuple[Denoiser, Denoiser]:
        """The denoisers of the teacher's density and of the generator's."""
        exact = (teacher or (lambda params: wrapper(network(model, params))))(frozen["teacher"])
        if guidance != 1.0:
            exact = denoisers.guided(exact, guidance, null)
        return exact, wrapper(network(model, score))

    def copies(state: State) -> tuple[nn.Module, State]:
        """What a chain runs: the model, and the state whose networks it takes."""
        if chain_dtype is None:
            return model, state
        narrow = replace(state, **{name: _narrowed(getattr(state, name), chain_dtype) for name in CHAINED})
        return model.clone(dtype=chain_dtype), narrow

    def init(key: Array, batch: Batch, frozen: Mapping[str, Any]) -> State:
        x0 = data_of(batch)
        fresh = model.init(key, x0, jnp.ones(x0.shape[0]), cond_of(batch))["params"]
        params = adopt(fresh, frozen.get("student", frozen["teacher"] if own else {}))
        ema, score = (jax.tree.map(jnp.copy, params) for _ in range(2))
        held = {"teacher": jax.tree.map(jnp.copy, frozen["teacher"])}
        return State(jnp.int32(0), params, ema, optimizer.init(params), score, score_optimizer.init(score), held)

    def draw(key: Array, batch: Batch, levels: Levels) -> dict[str, Any]:
        """Fresh (z, eps, sigma, cond)."""
        keys = dict(zip(("z", "eps", "sigma", "label"), jax.random.split(key, 4), strict=True))
        shape = data_of(batch).shape
        cond = draw_labels(keys["label"], cond_of(batch), model, shape[0], place)
        drawn = {name: place(jax.random.normal(keys[name], shape, jnp.float32)) for name in ("z", "eps")}
        return {**drawn, "sigma": place(levels(keys["sigma"], shape[0])), **({} if cond is None else {"cond": cond})}

    def match(state: State, batch: Batch, key: Array, factor: Any) -> tuple[Any, Any, Metrics]:
        """One update of D_S."""
        drawn, drop = jax.random.split(key)

        def gradient(score: Any, examples: Any, part: Any) -> tuple[Any, None]:
            cond = examples.get("cond")
            clean = {**examples, "x0": jax.lax.stop_gradient(generate(state.params, examples["z"], cond))}

            def loss(score: Any) -> Array:
                key = jax.random.fold_in(drop, part) if dropout else None
                net = model if score_updates == 1 else looped
                return denoising_loss(wrapper(network(net, score, key)), clean, score_weight)[0]

            return jax.value_and_grad(loss)(score), None

        (loss, gradients), _ = accumulate(gradient, state.score, draw(drawn, batch, score_levels), parts)
        score, opt_state = update(score_optimizer, gradients, state.score_opt_state, state.score, factor)
        return score, opt_state, {"score_loss": loss, "score_grad_norm": optax.tree.norm(gradients)}

    def improve(state: State, batch: Batch, key: Array) -> tuple[Any, Metrics]:
        """The gradient of the generator: E-step and M-step."""
        drawn, noise = jax.random.split(key)
        net, copy = copies(state)

        def gradient(params: Any, examples: Any, part: Any) -> tuple[Any, None]:
            cond, sigma = examples.get("cond"), examples["sigma"]
            make = lambda z, cond: generate(copy.params, z, cond, in_loops(net))  # noqa: E731
            inputs = (examples["z"], examples["eps"], sigma, examples["key"], cond)
            end = e_step(*densities(copy.frozen, copy.score, net), make, *inputs, unroll=unroll, **chain)
            loss, gradients = m_step(generate, params, end, sigma, cond, scheme=scheme, weight=weight)
            return ({"loss": loss, **end.metrics}, gradients), None

        examples = draw(drawn, batch, levels)
        examples["key"] = place(jax.random.split(noise, examples["sigma"].shape[0]))
        (metrics, gradients), _ = accumulate(gradient, state.params, examples, parts)
        return gradients, {**metrics, "grad_norm": optax.tree.norm(gradients)}

    def step(state: State, batch: Batch, key: Array) -> tuple[State, Metrics]:
        matching, chains = jax.random.split(key)
        factor = rate(state.step)

        def follow(carry: Any, key: Array) -> tuple[Any, Metrics]:
            score, opt_state, seen = match(replace(state, score=carry[0], score_opt_state=carry[1]), batch, key, factor)
            return (score, opt_state), seen

        carry = (state.score, state.score_opt_state)
        if score_updates == 1:
            carry, matched = follow(carry, matching)
        else:
            carry, matched = jax.lax.scan(follow, carry, jax.random.split(matching, score_updates))
        state = replace(state, score=carry[0], score_opt_state=carry[1])
        gradients, metrics = improve(state, batch, chains)
        params, opt_state = update(optimizer, gradients, state.opt_state, state.params, factor)
        done = state.step + 1
        average = ema_lib.average(decay(done, data_of(batch).shape[0]), state.ema, params)
        metrics |= {name: value.mean() for name, value in matched.items()}
        return replace(state, step=done, params=params, ema=average, opt_state=opt_state), metrics

    def denoiser(state: State) -> Denoiser:
        return wrapper(network(model, state.ema))

    def sample(state: State, noise: Array, cond: Cond = None, key: Array | None = None) -> Array:
        return generate(state.ema, noise, cond)

    def after(state: State, noise: Array, cond: Cond, key: Array, **how: Any) -> tuple[Array, Array]:
        make = lambda z, cond: generate(state.ema, z, cond, looped)  # noqa: E731
        return correct(*densities(state.frozen, state.score), make, noise, key, cond, **{**chain, **how})

    def export(state: State) -> State:
        return State(state.step, None, state.ema, None, None, None, None)

    return Method(init, step, sample, denoiser, export, correct=after)


emd.e_step = e_step  # type: ignore[attr-defined]  # `jaxdiff.methods.emd` is the function, not this module
