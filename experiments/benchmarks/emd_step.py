"""One EMD step against the sum of its parts, and the memory of a chain, for several numbers of Langevin steps.

    python -m experiments.benchmarks.emd_step [--steps=1,4] [--batch=64] [--rounds=15] [--memory]

A step with K Langevin steps is K forwards of the teacher and of the student score, K forwards of the generator with a
pull-back to z, an M-step (forward and gradient) and an update of the score (a forward of the generator, a gradient).
Each part is timed alone, with XLA's own convolution gradients outside any loop; step and parts take turns within each
round, and the median of their ratios is printed beside the cost model in forwards F: 4F for the score; 3F + 2KF for the
generator when z rests, 3F + K (4F to 5F) when it moves. The network is that of configs/digits.py. K = 0 stands for
Diff-Instruct. Times are CPU times of all threads. --memory compiles K = 2 and 16 instead and prints the temporary bytes
of both.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.benchmarks.timing import cpu_seconds, quartiles, spread_of
from jaxdiff import compilation, denoisers, models
from jaxdiff.cli import huge_pages
from jaxdiff.methods import Frozen, Parts, Teacher, emd, optimizers
from jaxdiff.methods.method import update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default="0,1,2,4", help="numbers of Langevin steps; 0 = Diff-Instruct")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    huge_pages.restart()
    setup = Setup(options.batch)
    if options.memory:
        sizes = {k: setup.program(k).memory_analysis().temp_size_in_bytes for k in (2, 16)}
        print(f"temporaries: {sizes[2]:,} bytes at K = 2, {sizes[16]:,} at K = 16: {sizes[16] / sizes[2]:.3f} times")
        return
    parts = setup.parts()
    programs = {k: setup.program(k) for k in map(int, options.steps.split(","))}
    for action in (*parts.values(), *(setup.action(program) for program in programs.values())):
        cpu_seconds(action)  # warm
    rounds: list[dict[Any, float]] = []
    for _ in range(options.rounds):
        timed: dict[Any, float] = {name: cpu_seconds(action) for name, action in parts.items()}
        rounds.append(timed | {k: cpu_seconds(setup.action(program)) for k, program in programs.items()})
    middle = {name: 1e3 * statistics.median(r[name] for r in rounds) for name in rounds[0]}
    print("parts, ms: " + ", ".join(f"{name} {middle[name]:.1f}" for name in parts))
    print(f"{'':16s}{'step, ms':>10s}{'step / parts':>24s}{'step / forward':>16s}{'cost model':>14s}")
    found: dict[int, list[float]] = {}
    for k in programs:
        found[k] = quartiles([r[k] / expected(r, k) for r in rounds])
        ratios = spread_of(found[k], 3)
        model = "9F" if k == 0 else f"{7 + 4 * k}F-{7 + 5 * k}F"
        name = "Diff-Instruct" if k == 0 else f"EMD-{k}"
        print(f"{name:16s}{middle[k]:10.1f}{ratios:>24s}{middle[k] / middle['forward']:15.1f}F{model:>14s}")
    print(f"median and quartiles of {len(rounds)} rounds, batch {options.batch}, on {jax.devices()[0].device_kind}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=2)


def expected(timed: dict[Any, float], k: int) -> float:
    """The parts of a step with K Langevin steps; K = 0: one that leaves z alone and shares the M-step's forward."""
    chain = 2 * timed["forward"] if k == 0 else k * (2 * timed["forward"] + timed["generator and pull-back"])
    return chain + timed["M-step"] + timed["score update"]


def compiled(function: Callable[..., Any]) -> Any:
    """As the trainer compiles."""
    return jax.jit(function, compiler_options=compilation.options(jax.default_backend()))


class Setup:
    """A network with random weights, a batch, and the programs."""

    def __init__(self, batch: int):
        fields: dict[str, Any] = {"resolution": 8, "channels": 1, "width": 16, "channel_mult": (1, 2), "blocks": 1}
        self.model = models.UNet(**fields, attention=(4,), num_classes=10)
        self.x, self.cond = jnp.ones((batch, 8, 8, 1)), {"label": jnp.zeros(batch, jnp.int32)}
        inputs = (jax.random.key(0), self.x, jnp.ones(batch), self.cond)
        shapes = jax.eval_shape(lambda: self.model.init(*inputs)["params"])
        rng = np.random.default_rng(0)
        self.params = jax.tree.map(lambda s: jnp.asarray(0.05 * rng.normal(size=s.shape), jnp.float32), shapes)
        self.optimizer = optax.adam(1e-4)
        self.batch = {"image": self.x, **self.cond}

    def program(self, k: int) -> Any:
        """The compiled step of a method with K Langevin steps."""
        chain = emd.DIFF_INSTRUCT if k == 0 else {"steps": k}
        own = Teacher(lambda params: denoisers.edm(models.bind(self.model, params)), Frozen(dict, dict), own=True)
        method = emd.build(emd.Options(**chain), Parts(self.model, optimizers(self.optimizer), teacher=own))
        init = jax.jit(method.init, compiler_options={"xla_backend_optimization_level": 0})
        self.state = init(jax.random.key(0), self.batch, {"teacher": self.params})
        return compiled(method.step).lower(self.state, self.batch, jax.random.key(1)).compile()

    def action(self, program: Any) -> Callable[[], Any]:
        return lambda: program(self.state, self.batch, jax.random.key(1))

    def parts(self) -> dict[str, Callable[[], Any]]:
        def denoise(params: Any, x: jax.Array) -> jax.Array:
            return denoisers.edm(models.bind(self.model, params))(x, 1.0, self.cond)

        @compiled
        def pull_back(params: Any, x: jax.Array) -> Any:
            made, pull = jax.vjp(lambda x: denoise(params, x), x)
            return made, pull(made)

        def loss(params: Any, x: jax.Array) -> jax.Array:
            return jnp.square(denoise(params, x) - x).mean()

        @compiled
        def m_step(params: Any, x: jax.Array) -> Any:
            opt_state = self.optimizer.init(params)
            return update(self.optimizer, jax.grad(loss)(params, x), opt_state, params)

        @compiled
        def score(params: Any, x: jax.Array) -> Any:
            made = jax.lax.stop_gradient(denoise(params, x))
            return update(self.optimizer, jax.grad(loss)(params, made), self.optimizer.init(params), params)

        found = {"forward": compiled(denoise), "generator and pull-back": pull_back, "M-step": m_step}
        found["score update"] = score
        return {name: lambda f=f: f(self.params, self.x) for name, f in found.items()}


if __name__ == "__main__":
    main()
