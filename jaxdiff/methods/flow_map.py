"""The frame of methods that learn a flow map: how it starts, is trained and sampled. A rule makes its loss.

flow_map(options, parts, levels, rule, reading) -> Method
levels(key, n, step) -> noise levels of the examples          rule(networks, examples) -> loss, metrics
reading: what the trained network is used as                  flow_targets.py: what rules are made of
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import ArrayLike
from ml_collections import ConfigDict

from jaxdiff import denoisers, flow_maps
from jaxdiff.conditions import SEMANTIC, Cond
from jaxdiff.denoisers import Denoiser
from jaxdiff.flow_maps import FlowMap
from jaxdiff.methods.averaging import average
from jaxdiff.methods.flow_targets import FlowMapOptions, Levels, Networks, Rule
from jaxdiff.methods.method import (
    Batch,
    Examples,
    Method,
    Metrics,
    Parts,
    TrainState,
    accumulate,
    advance,
    data_of,
    draw_noise,
    init_from_teacher,
    start,
    update,
    with_cond,
)
from jaxdiff.trees import Params

# ------------------------------------------------------------------------------------------ sampling


class Reading(NamedTuple):
    """How a trained flow map is used: as a denoiser, and to sample."""

    denoiser: Callable[[FlowMap], Denoiser]
    sample: Callable[[FlowMap, Array, Cond, Array | None], Array]


def by_jumps(parts: Parts) -> Reading:
    """Jumps from level to level of the grid; the last one ends at 0 instead of sample.sigma_min."""

    def sample(flow_map: FlowMap, noise: Array, cond: Cond, key: Array | None) -> Array:
        levels = np.append(parts.sampling.grid(max(parts.sampling.timestamps, 2))[:-1], 0.0)
        return flow_maps.sample(flow_map, levels[0] * noise, levels, cond)

    return Reading(flow_maps.diagonal, sample)


def by_ends(parts: Parts, tau: float = 0.0, *, diagonal: bool = False) -> Reading:
    """The end of the trajectory from each level of the grid, with fresh noise in between (`solvers.renoise`)."""

    def sample(flow_map: FlowMap, noise: Array, cond: Cond, key: Array | None) -> Array:
        assert parts.sampling.solve is not None
        return parts.sampling.solve(flow_maps.ending(flow_map, tau), noise, cond, key)

    return Reading(flow_maps.diagonal if diagonal else lambda flow_map: flow_maps.ending(flow_map, tau), sample)


def check_jumps(options: FlowMapOptions, sample: ConfigDict) -> None:
    """A flow map jumps along the grid: Euler's number of evaluations, without guidance, which it has learned."""
    changed = sample.final_denoise or sample.afs or sample.guidance != 1.0
    if sample.solver != "euler" or changed or sample.timestamps < 2:
        raise ValueError(
            "a flow map needs sample.solver='euler', sample.final_denoise=False, sample.afs=False, sample.guidance=1.0 "
            f"and sample.timestamps of at least 2, got {sample.solver!r}, {sample.final_denoise}, {sample.afs}, "
            f"{sample.guidance} and {sample.timestamps}"
        )
    check_range(options, sample)


def check_ends(options: FlowMapOptions, sample: ConfigDict) -> None:
    """A consistency model is sampled by the renoise solver, within the noise levels it was trained for."""
    if sample.solver != "renoise" or not sample.final_denoise or sample.afs or sample.guidance != 1.0:
        raise ValueError(
            f"a consistency model needs sample.solver='renoise', sample.final_denoise=True, sample.afs=False and "
            f"sample.guidance=1.0, got {sample.solver!r}, {sample.final_denoise}, {sample.afs} and {sample.guidance}"
        )
    check_range(options, sample)


def check_range(options: FlowMapOptions, sample: ConfigDict) -> None:
    """Samples start and end within the noise levels of training."""
    if sample.sigma_min < options.sigma_min or sample.sigma_max > options.sigma_max:
        raise ValueError(
            f"this student is trained from sigma_min={options.sigma_min} to sigma_max={options.sigma_max}; "
            f"sample.sigma_min={sample.sigma_min} and sample.sigma_max={sample.sigma_max} must lie within that range"
        )


# ------------------------------------------------------------------------------------------ training


def flow_map(
    options: FlowMapOptions,
    parts: Parts,
    levels: Levels,
    rule: Rule,
    reading: Reading,
    heads: Callable[[], dict[str, Params]] = dict,
) -> Method:
    """The method of a rule. `heads()` are further parameters that are trained beside the student, by name."""
    made = Training(options, parts, levels, rule, reading, heads)
    frozen = {} if parts.teacher is None else {"teacher": parts.teacher.frozen}
    return Method(made.init, made.step, made.sample, lambda params: reading.denoiser(made.network(params)), frozen)


@dataclass(frozen=True)
class Training:
    """The state's start, its updates, and sampling."""

    options: FlowMapOptions
    parts: Parts
    levels: Levels
    rule: Rule
    reading: Reading
    heads: Callable[[], dict[str, Params]]

    def __post_init__(self) -> None:
        options, teacher = self.options, self.parts.teacher
        if options.distil and teacher is None:
            raise ValueError("distillation needs a teacher: pass Parts(teacher=...), or set distil=False")
        if not options.distil and teacher is not None:
            raise ValueError("a teacher was given, but distil=False; set distil=True")
        guided = options.guidance != 1.0 or getattr(options, "guidance_mix", 0.0) > 0
        if guided and not self.parts.cond.has(SEMANTIC):
            raise ValueError(f"guidance={options.guidance} needs a network conditioned on classes or text")

    def network(self, params: Params, dropout: Array | None = None) -> FlowMap:
        """The student as a flow map; a network without tau is one for the tau it was trained for."""
        denoise = self.parts.denoiser(params, dropout=dropout)
        return flow_maps.of_network(denoise) if flow_maps.TAU in self.parts.cond else flow_maps.of_denoiser(denoise)

    def init(self, key: Array, batch: Batch, frozen: Mapping[str, Params] | None = None) -> TrainState:
        parts, params = self.parts, self.parts.initial(key, batch)
        if parts.teacher is not None:
            if frozen is None:
                raise ValueError("distillation needs a teacher: init(key, batch, {'teacher': parameters})")
            params = init_from_teacher(params, frozen["teacher"] if parts.teacher.own else {})
        used = {"ema": parts.average is not None, "target": bool(self.options.target_decay)}
        trained = {"student": params, **self.heads()}
        optimizers = dict.fromkeys(trained, parts.optimizers.scheduled)
        return start(trained, optimizers, [name for name, wanted in used.items() if wanted], frozen)

    def sample(self, params: Params, noise: Array, cond: Cond = None, key: Array | None = None) -> Array:
        return self.reading.sample(self.network(params), noise, cond, key)

    def networks(self, params: Mapping[str, Params], state: TrainState, dropout: Array) -> Networks:
        student = self.network(params["student"], dropout)
        target = self.network(state.averages["target"], dropout) if "target" in state.averages else student
        teacher, null = None, self.parts.cond.null(SEMANTIC)
        if self.parts.teacher is not None:
            teacher = self.parts.teacher.denoiser(state.frozen["teacher"])
            if self.options.guidance != 1.0:
                teacher = denoisers.guided(teacher, self.options.guidance, null)
        anchor = self.anchor(teacher, flow_maps.diagonal(target), null)
        return Networks(student, target, anchor, teacher, params, state.step)

    def anchor(self, teacher: Denoiser | None, own: Denoiser, null: Cond) -> Callable[[Array, Examples], Array]:
        """D of the teacher; of the data, guided by the student's own diagonal."""
        scale, mix = self.options.guidance, getattr(self.options, "guidance_mix", 0.0)

        def anchor(x: Array, examples: Examples) -> Array:
            sigma, cond = examples["sigma"], examples.get("cond")
            if teacher is not None:
                return jax.lax.stop_gradient(teacher(x, sigma, cond))
            if scale == 1.0 and not mix:
                return examples["x0"]
            free = own(x, sigma, _with_null(cond, null))
            mean = scale * examples["x0"] + (1 - scale - mix) * free
            return jax.lax.stop_gradient(mean + mix * own(x, sigma, cond) if mix else mean)

        return anchor

    def step(self, state: TrainState, batch: Batch, key: Array) -> tuple[TrainState, Metrics]:
        options, parts = self.options, self.parts
        keys = dict(zip(("sigma", "eps", "dropout"), jax.random.split(key, 3), strict=True))
        x0, cond = data_of(batch), parts.cond.of(batch)
        eps, paired = draw_noise(keys["eps"], x0, cond, parts.couple)
        if cond is not None:
            rates = {SEMANTIC: getattr(options, "cond_dropout", 0.0)}
            cond = parts.cond.dropout(jax.random.fold_in(key, 3), cond, rates)
        levels, seen = self.levels(keys["sigma"], len(x0), state.step)
        examples = with_cond({"x0": x0, "eps": eps, **levels}, cond)

        def gradient(params: Params, examples: Examples, part: ArrayLike) -> tuple[tuple[Metrics, Params], None]:
            dropout = jax.random.fold_in(keys["dropout"], part)

            def loss(params: Params) -> tuple[Array, Metrics]:
                value, metrics = self.rule(self.networks(params, state, dropout), examples)
                return value, {"loss": value, **metrics}

            (_, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(params)
            return (metrics, gradients), None

        (metrics, gradients), _ = accumulate(gradient, state.params, examples, parts.accum_steps)
        params, opt_state = {}, {}
        for name, value in gradients.items():
            params[name], opt_state[name] = update(
                parts.optimizers.scheduled, value, state.opt_state[name], state.params[name]
            )
        rate, targets = parts.rate(state.step + 1, len(x0)), {}
        if "target" in state.averages:
            decay = jnp.float32(1 - options.target_decay)
            targets["target"] = average(decay, state.averages["target"], params["student"])
        metrics |= {"grad_norm": optax.tree.norm(gradients["student"]), "ema_decay": 1 - rate, **seen, **paired}
        state = state.replace(params=params, opt_state=opt_state)  # type: ignore[attr-defined]
        return advance(state, params["student"], opt_state["student"], rate, **targets), metrics


def _with_null(cond: Cond, null: Cond) -> Cond:
    """cond with its null values."""
    if cond is None:
        return None
    empty = {
        name: jnp.broadcast_to(jnp.asarray(value, cond[name].dtype), cond[name].shape)
        for name, value in (null or {}).items()
        if name in cond
    }
    return {**cond, **empty}
