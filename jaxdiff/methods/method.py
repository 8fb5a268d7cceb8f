"""The interface of training algorithms: a tuple of pure functions over one state, built from options and parts.

    build(options, parts) -> Method

A method's module holds its equations, its `Options` (one comment per field: they are also the config section of that
name) and its `build`; an entry in `METHODS` registers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import struct
from jax import Array
from jax.typing import ArrayLike
from ml_collections import ConfigDict

from jaxdiff import solvers
from jaxdiff.conditions import Cond, Conditions
from jaxdiff.conventions import EDM, Convention
from jaxdiff.denoisers import Denoiser
from jaxdiff.methods.averaging import Rate, average
from jaxdiff.methods.optimization import Forced, Optimizers
from jaxdiff.models import Plain, bind, low_rank
from jaxdiff.noise.immiscible import Coupling
from jaxdiff.noise.levels import SigmaSampler, lognormal
from jaxdiff.placement import along_batch
from jaxdiff.trees import Params, Path, Tree, by_name, mismatches, path_name

EDM_DEFAULT = EDM()
Batch: TypeAlias = Mapping[str, Any]  # arrays with one row per example
Examples: TypeAlias = dict[str, Any]  # what a loss is computed from: x0, eps, sigma, ..., and cond
Metrics = dict[str, Array]
Sampler = Callable[[Denoiser, Array, Cond, Array | None], Array]  # (denoise, unit noise, cond, key) -> x0


# ------------------------------------------------------------------------------------------ state


@struct.dataclass
class TrainState:
    """Everything that must survive a restart. Only the method knows which keys the dicts have."""

    step: Tree  # int32
    params: Tree  # trained: student and, in some methods, score, head
    opt_state: Tree  # same keys as params
    averages: Tree  # of parameters: ema, target; of a head's density ratio: ratio
    frozen: Tree  # never trained: teacher, lpips


def start(
    params: Mapping[str, Params],
    optimizers: Mapping[str, optax.GradientTransformation],
    averages: Iterable[str] = (),
    frozen: Mapping[str, Tree] | None = None,
) -> TrainState:
    """The initial state: parameters, optimizer states, and a copy of the student for each name in `averages`."""
    opt_state = {name: optimizers[name].init(value) for name, value in params.items()}
    copies = {name: copy(params["student"]) for name in averages}
    return TrainState(jnp.int32(0), dict(params), opt_state, copies, copy(dict(frozen or {})))


def averaged(state: TrainState) -> Params:
    """The student's average if there is one, else the student; parameters or adapters."""
    return state.averages.get("ema", state.params["student"])


def exported(state: TrainState) -> Params:
    """The parameters to sample with: their average if there is one; adapters are merged into their base."""
    found = averaged(state)
    return low_rank.merged(state.frozen[found.base], found) if isinstance(found, low_rank.Adapters) else found


def copy(tree: Tree) -> Tree:
    return jax.tree.map(jnp.copy, tree)


# ------------------------------------------------------------------------------------------ interface


class Frozen(NamedTuple):
    """External arrays that a state holds: their shapes, and how to load them."""

    shapes: Callable[[], Tree]
    load: Callable[[], Tree]


class Method(NamedTuple):
    """init(key, batch, frozen) -> state; step(state, batch, key) -> (state, metrics); sample(params, noise, cond, key).

    The argument `frozen` holds {name: arrays} for each name in the field `frozen`, such as a teacher's parameters.
    Sampling takes parameters (`exported(state)`, or loaded ones), never a state; `denoiser(params)` is the network as a
    denoiser. `correct(state, noise, cond, key, ...)`, where defined, returns a generator's samples before and after
    correction by the teacher. `notes` are logged when a run starts from scratch.
    """

    init: Callable[..., TrainState]
    step: Callable[[TrainState, Batch, Array], tuple[TrainState, Metrics]]
    sample: Callable[..., Array]
    denoiser: Callable[[Params], Denoiser]
    frozen: Mapping[str, Frozen] = {}
    correct: Callable[..., tuple[Array, Array]] | None = None
    notes: tuple[str, ...] = ()


Features: TypeAlias = tuple[Callable[[Params, Array], Array], Frozen]  # (params, images) -> [b r c e], and the params


class Teacher(NamedTuple):
    """A teacher; `own` says whether it has the student's network: the student then starts from its parameters.

    `model` is its network, where it has one of another architecture.
    """

    denoiser: Callable[[Params], Denoiser]
    frozen: Frozen
    own: bool
    model: nn.Module | None = None


def default_grid(n: int) -> np.ndarray:
    """SFD's grid: polynomial, rho 7, from 80 to 0.006."""
    return solvers.grid(n, 0.006, 80.0)


@dataclass(frozen=True)
class Sampling:
    """How samples are drawn. Teachers use `solve`; students are trained for a grid or an initial noise level."""

    solve: Sampler | None = None  # (denoise, unit noise, cond, key) -> x0
    grid: Callable[[int], np.ndarray] = default_grid  # number of timestamps -> noise levels, descending
    timestamps: int = 0  # 0: the most the student supports
    afs: bool = False  # analytic first step, without a network evaluation
    guidance: float = 1.0
    sigma_max: float = 80.0  # (0, inf) where a one-step generator starts


@dataclass(frozen=True)
class Parts:
    """What a method is built from, besides its options."""

    model: nn.Module
    optimizers: Optimizers
    convention: Convention | Callable[..., Denoiser] = EDM_DEFAULT
    conditions: Conditions | None = None  # None: those the network declares
    sampling: Sampling = Sampling()
    shape: tuple[int, ...] = ()  # of one example
    sigmas: SigmaSampler = field(default_factory=lognormal)  # training noise levels
    shift: float = 1.0  # factor on noise levels, for images this many times larger
    average: Rate | None = None  # average of the parameters to sample with; None: the latest parameters
    couple: Coupling | None = None  # noise assigned to images
    teacher: Teacher | None = None
    total: int = 0  # total training steps
    accum_steps: int = 1  # gradients are accumulated over this many slices of a batch
    features: Features | None = None  # of clean images, to align activations with
    lora: low_rank.Base | None = None  # networks are adapters on a frozen base

    def __post_init__(self) -> None:
        if isinstance(self.model, Plain) or not hasattr(self.model, "init"):
            raise TypeError(
                f"Parts(model=...) takes a Flax module, got {type(self.model).__name__}; make one of functions "
                "init(key) and apply(params, x, noise_label, cond): models.Plain(init, apply).module(channels=3)"
            )

    @property
    def cond(self) -> Conditions:
        return Conditions.of_model(self.model) if self.conditions is None else self.conditions

    def denoiser(self, params: Params, *, model: nn.Module | None = None, **keys: Array | None) -> Denoiser:
        """The network (or the variant `model` of it) with these parameters; `keys` as in `models.bind`."""
        return self.convention(bind(model or self.model, self.weights(params), **keys))

    def weights(self, params: Params) -> Params:
        """What the network is applied with: the parameters, or adapters with their base."""
        return params if self.lora is None else self.lora.weights(params)

    def rate(self, done: Array, batch: int) -> Array:
        """The rate of the average, 1 - decay, after `done` updates; 1 tracks the latest parameters."""
        return jnp.float32(1) if self.average is None else self.average(done, batch)

    def initial(self, key: Array, batch: Batch) -> Params:
        """Freshly initialised parameters of the network, or adapters of it."""
        x0 = data_of(batch)
        cond = {**(self.cond.example(len(x0)) or {}), **(self.cond.of(batch) or {})}

        def init() -> Params:
            return self.model.init(key, x0, jnp.ones(len(x0)), cond or None)["params"]

        return init() if self.lora is None else self.lora.start(jax.random.fold_in(key, 1), init)


class Entry(NamedTuple):
    """A registered method: its options, how it is built, whether it needs a teacher and diffuses data."""

    options: type
    build: Callable[[Any, Parts], Method]
    teacher: Callable[[Any], bool] = lambda options: False
    data: bool = False  # adds noise to data, so noise.assignment applies
    fixed: tuple[str, ...] = ()  # fields of `sample` that a student is trained for
    check: Callable[[Any, ConfigDict], None] = lambda options, sample: None  # rejects an unsuitable `sample` section
    real: Callable[[Any], bool] = lambda options: False  # trains on real images besides its teacher's scores
    recipe: Callable[[ConfigDict, str], None] | None = None  # turns a teacher's config into a student's (recipes.py)
    values_only: bool = False  # takes no gradient through its teacher, so one outside JAX serves (teacher.on_host)


# ------------------------------------------------------------------------------------------ shared steps


def data_of(batch: Batch) -> Array:
    """The clean examples of a batch: `latent` if present, else `image`."""
    return jnp.asarray(batch["latent"] if "latent" in batch else batch["image"])


def draw_noise(key: Array, x0: Array, cond: Cond, couple: Coupling | None) -> tuple[Array, Metrics]:
    """Unit noise shaped like x0, assigned to images by `couple`, and the metrics of the assignment."""
    eps = jax.random.normal(key, x0.shape, x0.dtype)
    if couple is None:
        return eps, {}
    return couple(x0, eps, cond, jax.random.fold_in(key, 1))


def draw_labels(key: Array, cond: Cond, conditions: Conditions, examples: int) -> Cond:
    """The batch's conditioning with labels replaced by uniform draws."""
    if not conditions.num_classes:
        return cond
    labels = jax.random.randint(key, (examples,), 0, conditions.num_classes)
    return {**(cond or {}), "label": along_batch(labels)}


def with_cond(examples: Examples, cond: Cond) -> Examples:
    """The examples with their conditioning, if any."""
    return examples if cond is None else {**examples, "cond": cond}


def accumulate(
    gradient: Callable[[Params, Tree, ArrayLike], tuple[Tree, Tree]], params: Params, examples: Tree, parts: int
) -> tuple[Tree, Tree]:
    """`gradient(params, examples, i) -> (means, outputs)` over slices i of the batch: means averaged, outputs joined.

    Slice i holds examples i, i + parts, ..., so each device keeps its own. On CPU the loop is unrolled, because XLA is
    slow at convolution gradients inside a loop there.
    """
    if parts == 1:
        return gradient(params, examples, 0)
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(examples)}
    if any(size % parts for size in sizes):
        raise ValueError(f"a batch of {max(sizes)} is not divisible by accum_steps={parts}; change one of them")
    slices = jax.tree.map(lambda a: a.reshape(-1, parts, *a.shape[1:]).swapaxes(0, 1), examples)

    def add(total: Tree, inputs: tuple[Array, Tree]) -> tuple[Tree, Tree]:
        means, outputs = gradient(params, inputs[1], inputs[0])
        return jax.tree.map(jnp.add, total, means), outputs

    shapes, _ = jax.eval_shape(lambda: gradient(params, jax.tree.map(lambda a: a[0], slices), 0))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    loop = partial(jax.lax.scan, add)
    total, outputs = jax.lax.platform_dependent(
        zeros, (jnp.arange(parts), slices), cpu=partial(loop, unroll=parts), default=loop
    )
    whole = jax.tree.map(lambda a: a.swapaxes(0, 1).reshape(-1, *a.shape[2:]), outputs)
    return jax.tree.map(lambda a: a / parts, total), whole


def pseudo_huber(a: Array, b: Array, c: float = 0.00054) -> Array:
    """sqrt(|a - b|^2 + c^2 dim) - c sqrt(dim) per example: |a - b| at large distances, smooth at zero."""
    squares = jnp.square(a - b).reshape(a.shape[0], -1)
    offset = c * squares.shape[1] ** 0.5
    return jnp.sqrt(squares.sum(1) + offset**2) - offset


def update(
    optimizer: optax.GradientTransformation, gradients: Tree, opt_state: Tree, params: Params, factor: ArrayLike = 1.0
) -> tuple[Params, Tree]:
    """One optimizer step, scaled by `factor`, and what the network forces after it: (params, opt_state)."""
    # optax relies on implicit dtype promotion
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        if not (isinstance(factor, float) and factor == 1.0):
            updates = jax.tree.map(lambda u: u * factor, updates)
        params = optax.apply_updates(params, updates)
    return (optimizer.force(params) if isinstance(optimizer, Forced) else params), opt_state


def advance(state: TrainState, params: Params, opt_state: Tree, rate: Array, **averages: Params) -> TrainState:
    """The state after an update of the student: step incremented, ema updated, other averages as given."""
    kept = {**state.averages, **averages}
    if "ema" in kept:
        kept["ema"] = average(rate, state.averages["ema"], params)
    return state.replace(  # type: ignore[attr-defined]
        step=state.step + 1,
        params={**state.params, "student": params},
        opt_state={**state.opt_state, "student": opt_state},
        averages=kept,
    )


def init_from_teacher(fresh: Params, given: Params) -> Params:
    """`fresh` parameters with those in `given` substituted; unknown names and other shapes are rejected.

    Adapters stay as they are: their base has been given.
    """
    if isinstance(fresh, low_rank.Adapters):
        return copy(fresh)
    have = by_name(given)
    wrong = mismatches(have, by_name(fresh), partial=True)
    if wrong:
        raise ValueError(f"the teacher's parameters do not match the student's: {wrong}")

    def choose(path: Path, leaf: Array) -> Array:
        return jnp.array(have.get(path_name(path), leaf), leaf.dtype)

    return jax.tree_util.tree_map_with_path(choose, fresh)


def with_loop_convs(model: nn.Module) -> nn.Module:
    """The model with convolution gradients that are fast inside loops, if it has that option."""
    return model.clone(loop=True) if hasattr(model, "loop") else model
