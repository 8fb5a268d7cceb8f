"""Which divergence each scheme minimises, shown by a generator that cannot fit its teacher.

    python -m experiments.emd.divergences --out=runs/experiments

Teacher: half N(-2, 0.5^2), half N(2, 0.5^2). Generator: a z + b, from a = 1, b = 0.5. One noise level, exact scores,
gamma_eps = 0.05, SGD. Moments matched (the forward divergence, any level): a = sqrt(4.25) = 2.06. Mode seeking (the
reverse one): the optimum by quadrature. Complete cancellation is biased unless gamma_z is much smaller than gamma_eps.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common import results
from experiments.common.results import plt
from experiments.common.tables import show
from jaxdiff import denoisers
from jaxdiff.methods.emd import m_step
from jaxdiff.methods.langevin import Langevin, e_step

LOG_SNR = (1.0, 0.0)
# gamma_z, K, cancellation: the fixed points known from another implementation, at those two levels
CASES: dict[tuple[float, int, str], tuple[float, float]] = {
    (0.0, 1, "complete"): (1.804, 1.880),
    (0.0, 32, "complete"): (1.834, 1.931),
    (0.05, 32, "none"): (2.056, 2.044),
    (0.05, 32, "last"): (2.059, 2.045),
    (0.05, 32, "complete"): (3.088, 2.394),
    (0.005, 32, "complete"): (2.182, 2.050),
    (0.005, 32, "none"): (2.062, 2.016),
}
MEANS, STD, STEP = np.array([-2.0, 2.0]), 0.5, 0.05


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", default="runs/experiments", help="folder for the JSON and PNG files")
    p.add_argument("--examples", type=int, default=4096)
    p.add_argument("--iterations", type=int, default=1000)
    p.add_argument("--tiny", action="store_true", help="a few iterations, to try the script")
    args = p.parse_args()
    if args.tiny:
        args.examples, args.iterations = 64, 4
    levels = [float(np.exp(-value / 2)) for value in LOG_SNR]
    best = [reverse_optimum(level) for level in levels]
    rows = [["reverse optimum, by quadrature", *(f"{a:.3f}" for a in best), "1.80", "1.875"]]
    paths, found = {}, {}
    for (step_z, steps, cancel), known in CASES.items():
        name = f"gamma_z {step_z:g}, K {steps}, {cancel}"
        paths[name] = [descend(level, step_z, steps, cancel, args) for level in levels]
        found[name] = [float(np.abs(path[len(path) // 2 :]).mean()) for path in paths[name]]
        rows.append([name, *(f"{a:.3f}" for a in found[name]), *(f"{a:.3f}" for a in known)])
        print(rows[-1], flush=True)
    rows.append(["forward optimum: moments", "2.062", "2.062", "", ""])
    columns = ["|a| at the end", "log-SNR 1", "log-SNR 0", "known: 1", "0"]
    show(f"{args.examples} chains, {args.iterations} updates, mean of the second half", columns, rows)
    record = {"fixed_points": found, "reverse_optimum": best, "iterations": args.iterations}
    results.save(args.out, "emd_divergences", record, draw(paths, best))


def descend(level: float, step_z: float, steps: int, cancel: str, args: argparse.Namespace) -> np.ndarray:
    """The path of a."""
    teacher = denoisers.gaussian_mixture(MEANS[:, None], STD)
    generate = lambda p, z, cond=None: p["a"] * z + p["b"]  # noqa: E731
    scheme = "eps,z" if step_z else "eps"
    settings = Langevin(steps=steps, step_eps=STEP, step_z=step_z, cancel=cancel, scheme=scheme)
    sigma = jnp.full(args.examples, level)
    rate = 2.0 if steps == 1 else 0.3  # one short step moves little

    def move(params: dict, key: jax.Array) -> tuple[dict, jax.Array]:
        keys = jax.random.split(key, 3)
        z, eps = (jax.random.normal(k, (args.examples, 1)) for k in keys[:2])
        student = denoisers.gaussian(params["b"], params["a"])
        made = lambda z, cond: generate(params, z)  # noqa: E731
        chain = e_step(teacher, student, made, z, eps, sigma, keys[2], chain=settings)
        _, gradient = m_step(generate, params, chain, sigma)
        params = jax.tree.map(lambda p, g: p - rate * g, params, gradient)
        return params, params["a"]

    start = {"a": jnp.float32(1.0), "b": jnp.float32(0.5)}
    keys = jax.random.split(jax.random.key(0), args.iterations)
    return np.asarray(jax.jit(lambda keys: jax.lax.scan(move, start, keys)[1])(keys))


def reverse_optimum(level: float) -> float:
    """The a of least KL(student | teacher), b = 0, by quadrature."""
    x = np.linspace(-12, 12, 8001)
    var = STD**2 + level**2
    logs = np.logaddexp(*(-0.5 * (x - m) ** 2 / var for m in MEANS)) - np.log(2 * np.sqrt(2 * np.pi * var))

    def divergence(a: float) -> float:
        v = a**2 + level**2
        log_q = -0.5 * x**2 / v - 0.5 * np.log(2 * np.pi * v)
        return float(np.sum(np.exp(log_q) * (log_q - logs)) * (x[1] - x[0]))

    values = np.linspace(0.5, 3.5, 3001)
    return float(values[np.argmin([divergence(a) for a in values])])


def draw(paths: dict, best: list[float]) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for i, axis in enumerate(axes):
        for name, both in paths.items():
            axis.plot(np.abs(both[i]), lw=1, label=name)
        axis.axhline(4.25**0.5, color="k", ls=":", lw=1)
        axis.axhline(best[i], color="k", ls="--", lw=1)
        axis.set(
            title=f"log-SNR {LOG_SNR[i]:g}: dashed reverse, dotted forward optimum", xlabel="updates", ylabel="|a|"
        )
    axes[0].legend(fontsize=6)
    return figure


if __name__ == "__main__":
    main()
