"""Score distillation: a one-step generator trained by the gap between two scores.

    g(z) = D(sigma_star z, sigma_star), z ~ N(0, I)      the generator, initialised from the teacher
    D_T                                                  the teacher, frozen, optionally guided
    D_S                                                  the student score, trained to denoise g(z)

One step updates D_S by denoising score matching on g(z), then the generator by a rule that turns (D_T, D_S, g) into a
gradient: EM Distillation and Diff-Instruct in `emd.py`. This module has everything but the rule.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.typing import Dtype
from jax import Array
from jax.typing import ArrayLike
from ml_collections import ConfigDict

from jaxdiff import denoisers
from jaxdiff.conditions import SEMANTIC, Cond
from jaxdiff.denoisers import Denoiser
from jaxdiff.errors import check_sigma, choose, pick
from jaxdiff.methods.diffusion import denoising_loss
from jaxdiff.methods.method import (
    Batch,
    Examples,
    Method,
    Metrics,
    Parts,
    Teacher,
    TrainState,
    accumulate,
    advance,
    data_of,
    draw_labels,
    exported,
    init_from_teacher,
    start,
    update,
    with_cond,
    with_loop_convs,
)
from jaxdiff.noise.levels import LossWeight, SigmaSampler, at_least, loss_weight, uncovered
from jaxdiff.placement import along_batch
from jaxdiff.trees import Params, Path, Tree, path_name


@dataclass(frozen=True)
class ScoreOptions:
    """Options shared by all score distillation methods."""

    guidance: float = 1.0  # guidance scale of the teacher; the student score and the generator are not guided
    input_scale: str = "sigma"  # the network's input: sigma_star z, or ("one") sqrt(1 + sigma_star^2) z
    score_weight: str | LossWeight = "edm"  # loss weight of the student score, as diffusion.weight
    score_weight_options: Mapping[str, float] = field(default_factory=dict)  # its options
    score_levels: str = "chain"  # noise levels the student score is trained at: chain (those it is used at), noise
    score_rate: float = 1e-3  # learning rate of the student score; the generator's is optim.learning_rate
    score_updates: int = 1  # student score updates per generator update
    dropout: bool = False  # enable dropout when training the student score

    def check(self) -> None:
        choose(self.score_levels, ("chain", "noise"), "score_levels")
        if self.score_updates < 1:
            raise ValueError(f"score_updates must be at least 1, got {self.score_updates}")


class Networks(NamedTuple):
    """The networks of one update, as functions."""

    teacher: Denoiser
    score: Denoiser
    generate: Callable[[Params, Array, Cond], Array]  # (params, z, cond), for gradients w.r.t. params
    looped: Callable[[Array, Cond], Array]  # (z, cond), for gradients w.r.t. z inside loops


# (networks, generator's params, examples with z, eps, sigma, key and cond) -> (gradient, metrics)
Rule = Callable[[Networks, Params, Examples], tuple[Params, Metrics]]


def check_sample(options: ScoreOptions, sample: ConfigDict) -> None:
    """A generator takes one step from sigma_star = sample.sigma_max."""
    if sample.solver != "euler" or sample.timestamps != 1 or not sample.final_denoise or sample.afs:
        raise ValueError(
            f"a one-step generator takes one step from sigma_star = sample.sigma_max: set sample.solver='euler', "
            f"sample.timestamps=1, sample.final_denoise=True and sample.afs=False, got {sample.solver!r}, "
            f"{sample.timestamps}, {sample.final_denoise} and {sample.afs}"
        )
    if sample.guidance != 1.0:
        raise ValueError(
            f"the generator already learns the guided teacher; sample.guidance={sample.guidance} would guide it twice: "
            "set it to 1"
        )


def score_distillation(
    options: ScoreOptions,
    parts: Parts,
    rule: Rule,
    *,
    sigmas: SigmaSampler | None = None,
    sigma_min: float = 0.0,
    chain_dtype: Dtype | None = None,
    correct: Callable[..., tuple[Array, Array]] | None = None,
) -> Method:
    """The method whose generator is updated by `rule`.

    `init(key, batch, frozen)` takes {"teacher": parameters}; generator and D_S start from them if the teacher has their
    architecture, else from {"student": parameters} or untrained. Only the shapes and the conditioning (except labels)
    of a batch are used. `sigmas` samples the noise levels of the rule, raised to `sigma_min`, and by default those
    of the student score; without it both are those of `parts`. With `chain_dtype` the rule evaluates copies of all
    networks with kernels in that dtype, which halves memory traffic and communication; the trained parameters keep
    their dtype.
    """
    if parts.teacher is None:
        raise ValueError("score distillation needs a teacher: pass Parts(teacher=...)")
    check_sigma(parts.sampling.sigma_max)
    options.check()
    if options.guidance != 1.0 and not parts.cond.has(SEMANTIC):
        raise ValueError(f"guidance={options.guidance} needs a network conditioned on classes or text")
    if chain_dtype is not None and not hasattr(parts.model, "dtype"):
        raise ValueError(
            f"chain_dtype={chain_dtype} needs a network with a field dtype; {type(parts.model).__name__} has none"
        )
    sigmas = sigmas or parts.sigmas
    levels = Levels(at_least(sigmas, sigma_min), sigmas if options.score_levels == "chain" else parts.sigmas)
    made = ScoreDistillation(options, parts, parts.teacher, rule, levels, chain_dtype, correct)
    frozen = {"teacher": parts.teacher.frozen}
    corrected = None if correct is None else made.corrected
    return Method(made.init, made.step, made.sample, parts.denoiser, frozen, corrected)


def warn_uncovered(chain: SigmaSampler, score: SigmaSampler) -> None:
    """Warn if chains often visit noise levels at which the student score is hardly trained."""
    with jax.ensure_compile_time_eval():
        share, low, high = uncovered(chain, score)
    if share > 0.05:
        warnings.warn(
            f"{100 * share:.0f} % of the chains' noise levels lie outside {low:.3g} to {high:.3g}, where 99 % of those "
            "of the student score lie: it is used where it is not trained. Set emd.score_levels='chain', or widen "
            "`noise`",
            stacklevel=2,
        )


class Levels(NamedTuple):
    """Samplers of the noise levels of the rule and of the student score's training."""

    chain: SigmaSampler
    score: SigmaSampler


class ScoreDistillation:
    """What all rules share: the generator, the student score and its training, the order of updates."""

    def __init__(
        self,
        options: ScoreOptions,
        parts: Parts,
        teacher: Teacher,
        rule: Rule,
        levels: Levels,
        chain_dtype: Dtype | None,
        correct: Callable[..., tuple[Array, Array]] | None,
    ) -> None:
        self.options, self.parts, self.teacher, self.rule = options, parts, teacher, rule
        self.levels, self.chain_dtype, self.correct = levels, chain_dtype, correct
        self.sigma_star = parts.sampling.sigma_max
        scales = {"sigma": 1.0, "one": (1 + self.sigma_star**-2) ** 0.5}
        self.scale = pick(scales, options.input_scale, "input_scale of a generator")
        self.weight = loss_weight(options.score_weight, parts.convention, **options.score_weight_options)
        self.optimizers = {
            "student": parts.optimizers.constant(None),
            "score": parts.optimizers.constant(options.score_rate),
        }
        self.looped = with_loop_convs(parts.model)  # for gradients inside loops

    # -------------------------------------------------------------------------------------- networks

    def generate(self, params: Params, z: Array, cond: Cond = None, net: nn.Module | None = None) -> Array:
        """g(z) = D(sigma_star z, sigma_star)."""
        denoise = self.parts.denoiser(params, model=net)
        return denoisers.one_step(denoise, self.sigma_star, self.scale)(z, cond)

    def exact(self, frozen: Mapping[str, Params], net: nn.Module | None = None) -> Denoiser:
        """The teacher's denoiser, guided."""
        params = frozen["teacher"]
        denoise = self.parts.denoiser(params, model=net) if self.teacher.own else self.teacher.denoiser(params)
        if self.options.guidance == 1.0:
            return denoise
        return denoisers.guided(denoise, self.options.guidance, self.parts.cond.null(SEMANTIC))

    def networks(self, state: TrainState) -> Networks:
        """The networks that the rule evaluates."""
        net, student, score, frozen = self.parts.model, state.params["student"], state.params["score"], state.frozen
        if self.chain_dtype is not None:
            net = net.clone(dtype=self.chain_dtype)
            student, score, frozen = (_narrowed(tree, self.chain_dtype) for tree in (student, score, frozen))
        return Networks(
            teacher=self.exact(frozen, net),
            score=self.parts.denoiser(score, model=net),
            generate=self.generate,
            looped=lambda z, cond: self.generate(student, z, cond, with_loop_convs(net)),
        )

    # -------------------------------------------------------------------------------------- one step

    def init(self, key: Array, batch: Batch, frozen: Mapping[str, Params]) -> TrainState:
        if self.options.score_levels == "noise":
            warn_uncovered(*self.levels)
        given = frozen.get("student", frozen["teacher"] if self.teacher.own else {})
        params = init_from_teacher(self.parts.initial(key, batch), given)
        score = jax.tree.map(jnp.copy, params)
        averages = () if self.parts.average is None else ("ema",)
        return start({"student": params, "score": score}, self.optimizers, averages, {"teacher": frozen["teacher"]})

    def draw(self, key: Array, batch: Batch, sigmas: SigmaSampler) -> Examples:
        """Fresh (z, eps, sigma, cond)."""
        keys = dict(zip(("z", "eps", "sigma", "label"), jax.random.split(key, 4), strict=True))
        shape, conditions = data_of(batch).shape, self.parts.cond
        cond = draw_labels(keys["label"], conditions.of(batch), conditions, shape[0])
        drawn = {name: along_batch(jax.random.normal(keys[name], shape, jnp.float32)) for name in ("z", "eps")}
        return with_cond({**drawn, "sigma": along_batch(sigmas(keys["sigma"], shape[0]))}, cond)

    def match(self, state: TrainState, batch: Batch, key: Array, factor: ArrayLike) -> tuple[TrainState, Metrics]:
        """One update of D_S."""
        drawn, drop = jax.random.split(key)
        net = self.parts.model if self.options.score_updates == 1 else self.looped

        def gradient(score: Params, examples: Examples, part: ArrayLike) -> tuple[Tree, None]:
            made = self.generate(state.params["student"], examples["z"], examples.get("cond"))
            clean = {**examples, "x0": jax.lax.stop_gradient(made)}

            def loss(score: Params) -> Array:
                key = jax.random.fold_in(drop, part) if self.options.dropout else None
                return denoising_loss(self.parts.denoiser(score, model=net, dropout=key), clean, self.weight)[0]

            return jax.value_and_grad(loss)(score), None

        score, examples = state.params["score"], self.draw(drawn, batch, self.levels.score)
        (loss, gradients), _ = accumulate(gradient, score, examples, self.parts.accum_steps)
        score, opt_state = update(self.optimizers["score"], gradients, state.opt_state["score"], score, factor)
        metrics = {"score_loss": loss, "score_grad_norm": optax.tree.norm(gradients)}
        return _with_score(state, score, opt_state), metrics

    def improve(self, state: TrainState, batch: Batch, key: Array) -> tuple[Params, Metrics]:
        """The gradient of the generator, by the rule."""
        drawn, noise = jax.random.split(key)
        nets = self.networks(state)

        def gradient(params: Params, examples: Examples, part: ArrayLike) -> tuple[Tree, None]:
            gradients, metrics = self.rule(nets, params, examples)
            return (metrics, gradients), None

        examples = self.draw(drawn, batch, self.levels.chain)
        examples["key"] = along_batch(jax.random.split(noise, examples["sigma"].shape[0]))
        params = state.params["student"]
        (metrics, gradients), _ = accumulate(gradient, params, examples, self.parts.accum_steps)
        return gradients, {**metrics, "grad_norm": optax.tree.norm(gradients)}

    def step(self, state: TrainState, batch: Batch, key: Array) -> tuple[TrainState, Metrics]:
        matching, chains = jax.random.split(key)
        factor = self.parts.optimizers.factor(state.step)
        updates = self.options.score_updates
        if updates == 1:
            state, matched = self.match(state, batch, matching, factor)
        else:
            state, matched = _repeated(self.match, state, batch, jax.random.split(matching, updates), factor)
        gradients, metrics = self.improve(state, batch, chains)
        params, opt_state = update(
            self.optimizers["student"], gradients, state.opt_state["student"], state.params["student"], factor
        )
        metrics |= {name: value.mean() for name, value in matched.items()}
        return advance(state, params, opt_state, self.parts.rate(state.step + 1, len(data_of(batch)))), metrics

    # -------------------------------------------------------------------------------------- samples

    def sample(self, params: Params, noise: Array, cond: Cond = None, key: Array | None = None) -> Array:
        return self.generate(params, noise, cond)

    def corrected(self, state: TrainState, noise: Array, cond: Cond, key: Array, **how: float) -> tuple[Array, Array]:
        """The generator's samples before and after correction by the teacher."""
        assert self.correct is not None
        params = exported(state)
        score = self.parts.denoiser(state.params["score"])

        def generate(z: Array, cond: Cond) -> Array:
            return self.generate(params, z, cond, self.looped)

        return self.correct(self.exact(state.frozen), score, generate, noise, key, cond, **how)


def _with_score(state: TrainState, score: Params, opt_state: Tree) -> TrainState:
    return replace(state, params={**state.params, "score": score}, opt_state={**state.opt_state, "score": opt_state})


def _repeated(
    match: Callable[..., tuple[TrainState, Metrics]], state: TrainState, batch: Batch, keys: Array, factor: ArrayLike
) -> tuple[TrainState, Metrics]:
    """Several updates of D_S, in a loop whose carry holds nothing else."""

    def follow(carry: tuple[Params, Tree], key: Array) -> tuple[tuple[Params, Tree], Metrics]:
        after, seen = match(_with_score(state, *carry), batch, key, factor)
        return (after.params["score"], after.opt_state["score"]), seen

    carry, matched = jax.lax.scan(follow, (state.params["score"], state.opt_state["score"]), keys)
    return _with_score(state, *carry), matched


def _narrowed(params: Params, dtype: Dtype) -> Params:
    """Parameters with kernels cast to `dtype`; the others are small, and norms and tables need their precision."""

    def narrow(path: Path, leaf: Array) -> Array:
        return leaf.astype(dtype) if path_name(path).endswith("kernel") else leaf

    return jax.tree_util.tree_map_with_path(narrow, params)
