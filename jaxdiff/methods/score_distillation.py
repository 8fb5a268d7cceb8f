"""Score distillation: a generator trained by the gap between two scores.

    g(z)      the generator, one step or a few: `generators.py`; initialised from the teacher if it has its network
    D_T       the teacher, frozen, optionally guided
    D_S       the student score, trained to denoise g(z)
    C         the head of some methods, trained to tell real images from g(z): `heads.py`

One step updates D_S (and C) by denoising score matching on g(z), then the generator by a rule that turns (D_T, D_S, C,
g) into a gradient. With x = g(z) + sigma eps and gap = D_T(x) - D_S(x):

    diff_instruct   -J_g^T w gap
    sid             gradient of w gap . ((D_T - g) - alpha gap), through x too
    dmd2            diff_instruct with DMD's w, and the head's gan softplus(-C(x))
    f_distill       dmd2 times h(r), r = exp(C) the ratio of densities
    uni_instruct    sid times h(r), and gan softplus(-C(x))
    emd             the residual of Langevin chains on (eps, z)

This module has everything but the rules; what they are written in is in `score_rules.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.typing import Dtype
from jax import Array
from jax.typing import ArrayLike

from jaxdiff import denoisers
from jaxdiff.conditions import SEMANTIC, Cond
from jaxdiff.denoisers import Denoiser
from jaxdiff.methods.diffusion import denoising_loss
from jaxdiff.methods.generators import Generator
from jaxdiff.methods.heads import Head, HeadOptions, Logits, RatioWeight
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
from jaxdiff.methods.optimization import unforced
from jaxdiff.methods.score_rules import Levels, Networks, Rule, ScoreOptions
from jaxdiff.noise.levels import SigmaSampler, loss_weight
from jaxdiff.placement import along_batch
from jaxdiff.trees import Params, Path, Tree, path_name


def score_distillation(
    options: ScoreOptions,
    parts: Parts,
    rule: Rule,
    *,
    head: HeadOptions | None = None,
    ratio: RatioWeight | None = None,
    chain_dtype: Dtype | None = None,
    correct: Callable[..., tuple[Array, Array]] | None = None,
) -> Method:
    """The method whose generator is updated by `rule`.

    `init(key, batch, frozen)` takes {"teacher": parameters}; the generator starts from them if the teacher has its
    architecture, else from {"student": parameters} or untrained; D_S has the teacher's network and weights if it has
    one. Without a head and real origins, only the shapes and the conditioning (except labels) of a batch are used. With
    `chain_dtype` the rule evaluates copies of all networks with kernels in that dtype, which halves memory traffic and
    communication; the trained parameters keep their dtype. The running means of `ratio` are part of the state.
    """
    teacher = parts.teacher
    if teacher is None:
        raise ValueError("score distillation needs a teacher: pass Parts(teacher=...)")
    options.check()
    if options.guidance != 1.0 and not parts.cond.has(SEMANTIC):
        raise ValueError(f"guidance={options.guidance} needs a network conditioned on classes or text")
    if chain_dtype is not None and not hasattr(parts.model, "dtype"):
        raise ValueError(
            f"chain_dtype={chain_dtype} needs a network with a field dtype; {type(parts.model).__name__} has none"
        )
    made = ScoreDistillation(options, parts, teacher, rule, chain_dtype, correct, head, ratio)
    corrected = None if correct is None else made.corrected
    return Method(
        made.init,
        made.step,
        made.generator.sample,
        parts.denoiser,
        {"teacher": teacher.frozen},
        corrected,
        () if teacher.own else (UNTRAINED,),
    )


UNTRAINED = (
    "the student's network is not its teacher's, so it starts untrained; train.init_from starts it from a run of its "
    "own"
)


class ScoreDistillation:
    """What all rules share: the generator, the student score, the head, their training, the order of updates."""

    def __init__(
        self,
        options: ScoreOptions,
        parts: Parts,
        teacher: Teacher,
        rule: Rule,
        chain_dtype: Dtype | None,
        correct: Callable[..., tuple[Array, Array]] | None,
        head: HeadOptions | None,
        ratio: RatioWeight | None,
    ) -> None:
        self.options, self.parts, self.teacher, self.rule = options, parts, teacher, rule
        self.chain_dtype, self.correct, self.ratio = chain_dtype, correct, ratio
        if ratio is not None:
            ratio.check()
        self.levels = Levels.of(options, parts)
        self.generator = Generator(parts, options.input_scale, getattr(options, "origin", ""))
        self.weight = loss_weight(options.score_weight, parts.convention, **options.score_weight_options)
        self.teacher_model = parts.model if teacher.own else teacher.model
        read = self.teacher_model if options.score_network == "teacher" else None
        self.score_model = read or parts.model
        self.head = None if head is None else Head(head, parts, self._head_model(head))
        constant = parts.optimizers.constant
        self.optimizers = {"student": constant(None), "score": constant(options.score_rate)}
        if head is not None:
            self.optimizers["head"] = unforced(constant(head.head_rate or options.score_rate))

    def _head_model(self, head: HeadOptions) -> nn.Module:
        head.check_head()
        model = self.score_model if head.head_on == "score" else self.teacher_model
        if model is None:
            raise ValueError(
                f"head_on={head.head_on!r} reads activations of the teacher, which has no network; set it to 'score'"
            )
        return model

    # -------------------------------------------------------------------------------------- networks

    def exact(self, frozen: Mapping[str, Params], net: nn.Module | None = None) -> Denoiser:
        """The teacher's denoiser, guided."""
        params = frozen["teacher"]
        denoise = self.teacher.denoiser(params) if net is None else self.parts.denoiser(params, model=net)
        if self.options.guidance == 1.0:
            return denoise
        return denoisers.guided(denoise, self.options.guidance, self.parts.cond.null(SEMANTIC))

    def networks(self, state: TrainState) -> Networks:
        """The networks that the rule evaluates."""
        student, score, frozen = state.params["student"], state.params["score"], state.frozen
        own, read, exact = self.parts.model, self.score_model, self.teacher_model
        if self.chain_dtype is not None:
            own, read = (net.clone(dtype=self.chain_dtype) for net in (own, read))
            exact = exact and exact.clone(dtype=self.chain_dtype)
            student, score, frozen = (_narrowed(tree, self.chain_dtype) for tree in (student, score, frozen))
        return Networks(
            teacher=self.exact(frozen, exact),
            score=self.parts.denoiser(score, model=read),
            generate=self.generator,
            looped=lambda z, cond: self.generator(student, z, cond, net=with_loop_convs(own)),
            head=self.logits(state.params, state.frozen) if self.head else None,
            means=state.averages.get("ratio"),
        )

    def logits(self, params: Params, frozen: Params, net: nn.Module | None = None) -> Logits:
        """The head's, with the parameters of the network that it reads."""
        assert self.head is not None
        if self.head.options.head_on == "teacher":
            return self.head.logits(params["head"], frozen["teacher"])
        return self.head.logits(params["head"], params["score"], net)

    # -------------------------------------------------------------------------------------- one step

    def init(self, key: Array, batch: Batch, frozen: Mapping[str, Params]) -> TrainState:
        if self.options.score_levels == "noise":
            self.levels.warn_uncovered()
        given = frozen.get("student", frozen["teacher"] if self.teacher.own else {})
        params = {"student": init_from_teacher(self.parts.initial(key, batch), given)}
        params["score"] = jax.tree.map(jnp.copy, params["student"])
        if self.score_model is not self.parts.model:
            fresh = replace(self.parts, model=self.score_model).initial(key, batch)
            params["score"] = init_from_teacher(fresh, frozen["teacher"])
        if self.head is not None:
            read = params["score"] if self.head.options.head_on == "score" else frozen["teacher"]
            params["head"] = self.head.init(jax.random.fold_in(key, 1), batch, read)
        averages = () if self.parts.average is None else ("ema",)
        state = start(params, self.optimizers, averages, {"teacher": frozen["teacher"]})
        means = {"ratio": self.ratio.initial()} if self.ratio else {}
        return state.replace(averages={**state.averages, **means})  # type: ignore[attr-defined]

    def draw(self, key: Array, batch: Batch, sigmas: SigmaSampler) -> Examples:
        """Fresh (z, eps, sigma, cond), and the generator's step where it takes several."""
        keys = dict(zip(("z", "eps", "sigma", "label"), jax.random.split(key, 4), strict=True))
        shape = data_of(batch).shape
        cond: Cond = self.parts.cond.of(batch)
        if not self.generator.reads_data:
            cond = draw_labels(keys["label"], cond, self.parts.cond, shape[0])
        drawn = {name: along_batch(jax.random.normal(keys[name], shape, jnp.float32)) for name in ("z", "eps")}
        drawn |= {"sigma": along_batch(sigmas(keys["sigma"], shape[0]))}
        return with_cond({**drawn, **self.generator.draw(jax.random.fold_in(key, 4), batch)}, cond)

    def match(self, state: TrainState, batch: Batch, key: Array, factor: ArrayLike) -> tuple[TrainState, Metrics]:
        """One update of D_S, and of the head."""
        drawn, drop = jax.random.split(key)
        net = self.score_model if self.options.score_updates == 1 else with_loop_convs(self.score_model)
        student = state.params["student"]

        def gradient(trained: Tree, examples: Examples, part: ArrayLike) -> tuple[Tree, None]:
            examples = self.generator.begin(student, examples)
            made = self.generator(student, examples["z"], examples.get("cond"), examples.get("start"))
            fake = {**examples, "x0": jax.lax.stop_gradient(made)}

            def loss(trained: Tree) -> tuple[Array, Metrics]:
                key = jax.random.fold_in(drop, part) if self.options.dropout else None
                denoise = self.parts.denoiser(trained["score"], model=net, dropout=key)
                value, _ = denoising_loss(denoise, fake, self.weight)
                if self.head is None:
                    return value, {"score_loss": value}
                extra, seen = self.head.loss(self.logits(trained, state.frozen, net), fake, examples["real"])
                return value + self.head.options.head_weight * extra, {"score_loss": value, **seen}

            (_, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(trained)
            return (metrics, gradients), None

        examples = self.draw(drawn, batch, self.levels.score)
        if self.head is not None:
            eps = jax.random.normal(jax.random.fold_in(drawn, 5), data_of(batch).shape, jnp.float32)
            real = {"x0": data_of(batch), "sigma": examples["sigma"], "eps": along_batch(eps)}
            examples["real"] = with_cond(real, self.parts.cond.of(batch))
        trained = _matched(state.params)
        (metrics, gradients), _ = accumulate(gradient, trained, examples, self.parts.accum_steps)
        metrics["score_grad_norm"] = optax.tree.norm(gradients["score"])
        done = {
            name: update(self.optimizers[name], gradients[name], state.opt_state[name], tree, factor)
            for name, tree in trained.items()
        }
        return _with(state, {n: done[n][0] for n in done}, {n: done[n][1] for n in done}), metrics

    def improve(self, state: TrainState, batch: Batch, key: Array) -> tuple[Params, Metrics]:
        """The gradient of the generator, by the rule."""
        drawn, noise = jax.random.split(key)
        nets = self.networks(state)

        def gradient(params: Params, examples: Examples, part: ArrayLike) -> tuple[Tree, None]:
            gradients, metrics = self.rule(nets, params, self.generator.begin(params, examples))
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
        averages = {}
        if self.ratio:
            averages["ratio"] = self.ratio.updated(state.averages["ratio"], metrics.pop("ratio"))
        metrics |= {name: value.mean() for name, value in matched.items()}
        rate = self.parts.rate(state.step + 1, len(data_of(batch)))
        return advance(state, params, opt_state, rate, **averages), metrics

    # -------------------------------------------------------------------------------------- samples

    def corrected(self, state: TrainState, noise: Array, cond: Cond, key: Array, **how: float) -> tuple[Array, Array]:
        """The generator's samples before and after correction by the teacher."""
        assert self.correct is not None
        params, looped = exported(state), with_loop_convs(self.parts.model)
        score = self.parts.denoiser(state.params["score"], model=self.score_model)

        def generate(z: Array, cond: Cond) -> Array:
            return self.generator(params, z, cond, net=looped)

        return self.correct(self.exact(state.frozen), score, generate, noise, key, cond, **how)


def _matched(trees: Mapping[str, Tree]) -> dict[str, Tree]:
    """Those that `match` trains: all but the student's."""
    return {name: tree for name, tree in trees.items() if name != "student"}


def _with(state: TrainState, params: Mapping[str, Params], opt_state: Mapping[str, Tree]) -> TrainState:
    return replace(state, params={**state.params, **params}, opt_state={**state.opt_state, **opt_state})


def _repeated(
    match: Callable[..., tuple[TrainState, Metrics]], state: TrainState, batch: Batch, keys: Array, factor: ArrayLike
) -> tuple[TrainState, Metrics]:
    """Several updates of D_S, in a loop whose carry holds nothing else."""

    def follow(carry: tuple[Tree, Tree], key: Array) -> tuple[tuple[Tree, Tree], Metrics]:
        after, seen = match(_with(state, *carry), batch, key, factor)
        return (_matched(after.params), _matched(after.opt_state)), seen

    carry, matched = jax.lax.scan(follow, (_matched(state.params), _matched(state.opt_state)), keys)
    return _with(state, *carry), matched


def _narrowed(params: Params, dtype: Dtype) -> Params:
    """Parameters with kernels cast to `dtype`; the others are small, and norms and tables need their precision."""

    def narrow(path: Path, leaf: Array) -> Array:
        return leaf.astype(dtype) if path_name(path).endswith("kernel") else leaf

    return jax.tree_util.tree_map_with_path(narrow, params)
