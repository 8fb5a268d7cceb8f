"""What the studies share: the teacher, distillations of it, samples, their distance to the data, tables and files.

Distances are Fréchet distances in the features of the embedded digit classifier; they are not FIDs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from jaxdiff import evaluation, solvers, training, weights
from jaxdiff.configs import digits, digits_emd, digits_sfd
from jaxdiff.models import network
from jaxdiff.training import export
from jaxdiff.training.build import build_wrapper
from jaxdiff.training.evaluate import reference_features


def parser(doc: str | None, iterations: int, seeds: int) -> argparse.ArgumentParser:
    """The flags of every study."""
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--teacher", default="runs/digits", help="workdir of a teacher trained with configs/digits.py")
    p.add_argument("--out", default="runs/experiments", help="folder for the JSON and PNG files")
    p.add_argument("--iterations", type=int, default=iterations, help="of each distillation")
    p.add_argument("--seeds", type=int, default=seeds, help="each is a seed of distillation and of sampling")
    p.add_argument("--samples", type=int, default=2000, help="images behind each distance")
    p.add_argument("--tiny", action="store_true", help="an untrained small teacher and 2 iterations, to try the script")
    return p


def parse(p: argparse.ArgumentParser) -> argparse.Namespace:
    args = p.parse_args()
    if args.tiny:
        args.iterations, args.samples, args.teacher = min(args.iterations, 2), min(args.samples, 64), ""
    elif not Path(args.teacher).is_dir():
        p.error(
            f"there is no teacher at {args.teacher}; make one with: jaxdiff train --config=configs/digits.py "
            f"--workdir={args.teacher}"
        )
    return args


class Judge:
    """What images are worth beside the data of a job, in the features of the digit classifier."""

    def __init__(self, job: Any):
        self.net = evaluation.feature_net("digits")
        self.real = reference_features(job, self.net).features

    def features(self, images: Any) -> Any:
        """Of images rounded to 8 bits."""
        pixels = evaluation.to_uint8(np.asarray(images))
        return evaluation.extract(self.net, [pixels], batch_size=min(500, len(pixels)), keep=True)

    def frechet(self, images: Any) -> float:
        return evaluation.frechet_distance(self.features(images).features, self.real)

    def measure(self, images: Any, labels: Any = None) -> dict[str, float]:
        """Fréchet distance, precision, recall, density, coverage; with labels, accuracy."""
        found = self.features(images)
        scores = {"frechet": evaluation.frechet_distance(found.features, self.real)}
        if labels is not None:
            scores["accuracy"] = float((found.probabilities.argmax(1) == np.asarray(labels)).mean())
        return {**scores, **evaluation.prdc(self.real, found.features)}


class Lab:
    """The teacher, loaded once, with the features of the data."""

    def __init__(self, args: argparse.Namespace, method: str = "sfd"):
        self.args = args
        self.seeds = range(args.seeds)
        self.base = {"sfd": digits_sfd, "emd": digits_emd}[method].get_config("tiny" if args.tiny else "")
        if not jax.config.jax_compilation_cache_dir:
            jax.config.update("jax_compilation_cache_dir", str(Path(self.base.compile_cache).expanduser()))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        with self.base.unlocked():
            self.base.teacher.path = args.teacher
        job = training.build(self.base)
        self.dataset = job.dataset
        self.teacher = job.frozen.load()["teacher"]
        lpips = getattr(args, "lpips", "")
        self.lpips = jax.device_get(weights.load(lpips, "lpips")[1]) if lpips else None
        self.judge = Judge(job)
        self.measure = self.judge.measure
        plain = job.model.clone(step_embed="")  # the teacher has no such condition
        self.network = lambda params: build_wrapper(self.base)(network(plain, params))
        self.compiled = jax.jit(lambda params, x, sigma, cond: self.network(params)(x, sigma, cond))

    def noise(self, seed: int, count: int) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Unit noise and labels of a sampling seed."""
        unit, label = jax.random.split(jax.random.key(1000 + seed))
        shape = (count, *self.dataset.image_shape)
        return jax.random.normal(unit, shape), {"label": jax.random.randint(label, (count,), 0, 10)}

    def solve(self, solver: str, n: int, afs: bool, to_zero: bool, t_min: float, unit: Any, cond: Any) -> np.ndarray:
        """Samples of the teacher by a training-free solver on n timestamps.

        The network is compiled once and the loop is Python's, unlike in `solvers.solve`: dozens of variants run here.
        """
        method, sigmas = solvers.make(solver), solvers.grid(n, t_min, 80.0)
        denoise = partial(self.compiled, self.teacher)
        x, past = jnp.float32(sigmas[0]) * unit, (jnp.zeros_like(unit),) * method.history
        for i in range(n - 1):
            row = {name: jnp.asarray(column[i], jnp.float32) for name, column in method.table(sigmas, np).items()}
            first = solvers.analytic_first_step if afs and i == 0 else denoise
            x, past = method.step(first, denoise, cond, x, past, row, None)
        return np.asarray(denoise(x, jnp.float32(sigmas[-1]), cond) if to_zero else x)

    def recipe(self, nfe: Sequence[int], changes: dict[str, Any], iterations: int | None = None) -> Recipe:
        """A distillation of SFD for those evaluations."""
        changes = {**changes, "sfd.nfe": tuple(nfe)}
        afs = changes.get("sample.afs", self.base.sample.afs)
        return self.run({**changes, "sample.steps": max(nfe) + 1 + int(afs)}, iterations)

    def run(self, changes: dict[str, Any], iterations: int | None = None) -> Recipe:
        """A distillation by the base config with those changes."""
        return Recipe(self, changes, self.args.iterations if iterations is None else iterations)

    def teacher_seconds(self, timed: int = 50) -> float:
        """Seconds of the teacher's whole training, from `timed` of its steps; compilation and data left out."""
        config = digits.get_config("tiny") if self.args.tiny else export.read_config(Path(self.args.teacher))
        job = training.build(config)
        batch = jax.tree.map(jnp.asarray, job.dataset.batch(0, config.data.batch_size))
        state = _init(job.method.init)(jax.random.key(0), batch)
        step = jax.jit(job.method.step, donate_argnums=0).lower(state, batch, jax.random.key(0)).compile()
        _, seconds = _repeat(step, state, batch, timed)
        return seconds / timed * config.train.steps


class Recipe:
    """A distillation: a config and its compiled programs, kept over seeds."""

    def __init__(self, lab: Lab, changes: dict[str, Any], iterations: int):
        self.lab, self.iterations = lab, iterations
        config = lab.base.copy_and_resolve_references()
        if "lpips" in changes.get("sfd.loss", ""):
            changes = {**changes, "sfd.lpips.weights": "given", "sfd.lpips.resize": 32}
        with config.unlocked():
            config.update_from_flattened_dict(changes)
            config.optim.decay_images = iterations * config.data.batch_size
        self.config, self.method = config, training.build(config).method
        example = lab.dataset.take(0, 1)
        self.batch = {k: jnp.zeros((config.data.batch_size, *v.shape[1:]), v.dtype) for k, v in example.items()}
        self.start, self.step = _init(self.method.init), None
        self.samplers: dict[int | None, Any] = {}

    def train(self, seed: int, teacher: Any = None, watch: Any = None) -> tuple[Any, float]:
        """The student and the seconds of its fine-tuning, compilation left out; `watch(iteration, state, metrics)`."""
        state = self.begin(seed, teacher)
        if self.step is None:
            run = jax.jit(self.method.step, donate_argnums=0)
            self.step = run.lower(state, self.batch, jax.random.key(0)).compile()
        state, seconds = _repeat(self.step, state, self.batch, self.iterations, seed, watch)
        return self.method.export(state), seconds

    def begin(self, seed: int, teacher: Any = None) -> Any:
        """The state before training."""
        frozen = {"teacher": self.lab.teacher if teacher is None else teacher}
        if self.config.method.name == "sfd" and "lpips" in self.config.sfd.loss:
            frozen["lpips"] = self.lab.lpips
        return self.start(jax.random.key(seed), self.batch, frozen)

    def sample(self, state: Any, nfe: int | None, seed: int) -> np.ndarray:
        """Images of a sampling seed; `nfe` for students of several numbers of evaluations."""
        if nfe not in self.samplers:
            how = {} if nfe is None else {"nfe": nfe}
            self.samplers[nfe] = jax.jit(lambda state, unit, cond: self.method.sample(state, unit, cond, **how))
        return np.asarray(self.samplers[nfe](state, *self.lab.noise(seed, self.lab.args.samples)))

    def frechets(self) -> dict[int, list[float]]:
        """{evaluations: distances, one a seed}; each seed distils and samples anew."""
        students = {seed: self.train(seed)[0] for seed in self.lab.seeds}
        return {
            nfe: [self.lab.measure(self.sample(student, nfe, seed))["frechet"] for seed, student in students.items()]
            for nfe in self.config.sfd.nfe
        }


def _init(init: Any) -> Any:
    """An initialiser runs once: on CPU, spare it the compiler's optimizations."""
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(init, compiler_options=options)


def _repeat(step: Any, state: Any, batch: Any, count: int, seed: int = 0, watch: Any = None) -> tuple[Any, float]:
    """`count` steps and the seconds they took, without those of `watch`."""
    keys = list(jax.random.split(jax.random.key(seed), count))
    begun, aside = time.monotonic(), 0.0
    for done, key in enumerate(keys, 1):
        state, metrics = step(state, batch, key)
        if watch is not None:
            jax.block_until_ready(state)
            paused = time.monotonic()
            watch(done, state, metrics)
            aside += time.monotonic() - paused
    jax.block_until_ready(state)
    return state, time.monotonic() - begun - aside


# ------------------------------------------------------------------------------------------ tables and files


def spread(values: Sequence[float]) -> float:
    """Standard deviation over seeds; 0 for one seed."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def cell(values: Sequence[float]) -> str:
    """mean ± sd, or the value when there is one."""
    return f"{statistics.mean(values):.3f}" + (f" ± {spread(values):.3f}" if len(values) > 1 else "")


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """An aligned table, its first column to the left."""
    table = [list(columns), *([str(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    print(f"\n{title}")
    for row in table:
        print("  ".join(v.rjust(w) if i else v.ljust(w) for i, (v, w) in enumerate(zip(row, widths, strict=True))))


def save(lab: Lab, name: str, results: dict[str, Any], figure: Any = None) -> None:
    """NAME.json with the settings beside the results, and NAME.png."""
    out = Path(lab.args.out)
    out.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in vars(lab.args).items() if key not in ("teacher", "out", "lpips")}
    settings |= {
        "feature_sha256": lab.judge.net.sha256,
        "reference_samples": len(lab.judge.real),
        "config": lab.base.to_dict(),
    }
    settings["config"]["teacher"]["path"] = ""
    text = json.dumps({"settings": settings, **results}, indent=2, default=str)
    (out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    if figure is not None:
        figure.tight_layout()
        figure.savefig(out / f"{name}.png", dpi=100)
        plt.close(figure)
    print(f"\nwrote {name}.json{'' if figure is None else f' and {name}.png'} to {out}")
