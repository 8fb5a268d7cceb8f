"""Error of every deterministic solver against the number of network evaluations, on a mixture with an exact denoiser.

    python experiments/solvers/compare.py [--out solvers.png]

Prints the table (mean distance of end states to a 1,024-step Heun solve) and draws it with the samples.
"""

import argparse

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from jaxdiff import denoisers, solvers

SIGMA_MIN, SIGMA_MAX = 0.006, 80.0
BUDGETS = (4, 6, 8, 12, 16, 24, 32, 64)
SOLVERS = {
    "euler": solvers.euler(),
    "heun": solvers.heun(),
    "dpm2": solvers.dpm2(),
    "ipndm (4)": solvers.ipndm(4),
    "dpmpp2m": solvers.dpmpp2m(),
    "dpmpp3m, kappa 1": solvers.dpmpp3m(),
    "dpmpp3m, kappa 2": solvers.dpmpp3m(kappa=2.0),
    "unipc": solvers.unipc(),
}


def spiral(arms: int = 3, per_arm: int = 8) -> np.ndarray:
    """Means on a few spiral arms inside the unit disc."""
    radius = np.linspace(0.25, 1.0, per_arm)
    angle = 2 * np.pi * (np.arange(arms)[:, None] / arms + 0.35 * radius[None])
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1).reshape(-1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="solvers.png")
    out = parser.parse_args().out
    denoise = denoisers.gaussian_mixture(spiral(), 0.04)
    noise = jax.random.normal(jax.random.key(0), (4096, 2))

    def run(solver: solvers.Solver, n: int) -> jax.Array:
        sigmas = solvers.grid(n, SIGMA_MIN, SIGMA_MAX)
        return jax.jit(lambda z: solvers.solve(denoise, sigmas[0] * z, sigmas, solver))(noise)

    truth = run(solvers.heun(), 1025)
    errors = {
        name: [float(jnp.linalg.norm(run(solver, solver.timestamps(nfe)) - truth, axis=-1).mean()) for nfe in BUDGETS]
        for name, solver in SOLVERS.items()
    }
    print("mean distance to the exact end state, by evaluations of the denoiser")
    print(f"{'solver':18s}" + "".join(f"{nfe:>9d}" for nfe in BUDGETS))
    for name, row in errors.items():
        print(f"{name:18s}" + "".join(f"{error:9.4f}" for error in row))
    draw(
        errors,
        {name: run(SOLVERS[name], SOLVERS[name].timestamps(8)) for name in ("euler", "dpmpp2m", "unipc")},
        truth,
        out,
    )
    print(f"wrote {out}")


def draw(errors: dict[str, list[float]], few: dict[str, jax.Array], truth: jax.Array, out: str) -> None:
    figure, axes = plt.subplots(
        1, 2 + len(few), figsize=(4 * (2 + len(few)), 4), width_ratios=[1.4] + [1] * (1 + len(few))
    )
    for name, row in errors.items():
        axes[0].loglog(BUDGETS, row, marker="o", markersize=3, label=name)
    axes[0].set(xlabel="evaluations", ylabel="mean distance to the exact end", title="error")
    axes[0].legend(fontsize=7)
    for axis, (name, points) in zip(axes[1:], {**few, "exact": truth}.items(), strict=True):
        axis.scatter(*np.asarray(points).T, s=0.6, alpha=0.5)
        axis.set(
            title=name if name == "exact" else f"{name}, 8 evaluations",
            aspect="equal",
            xlim=(-1.3, 1.3),
            ylim=(-1.3, 1.3),
        )
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(out, dpi=90)


if __name__ == "__main__":
    main()
