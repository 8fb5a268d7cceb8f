"""Distillations of a teacher of the digits, sampled from noise that all samplers share, measured against the data."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common import results
from experiments.common.loops import Loop, use_compile_cache
from experiments.common.quality import DigitQuality
from jaxdiff import solvers, training
from jaxdiff.configs import digits, digits_emd, digits_sfd
from jaxdiff.methods import TrainState, exported
from jaxdiff.methods.sfd import teacher_model
from jaxdiff.models import bind
from jaxdiff.training import export


def parser(doc: str | None, iterations: int, seeds: int) -> argparse.ArgumentParser:
    """The flags of every study of distillation."""
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--teacher", default="runs/digits", help="workdir of a teacher trained with configs/digits.py")
    p.add_argument("--out", default="runs/experiments", help="folder for the JSON and PNG files")
    p.add_argument("--iterations", type=int, default=iterations, help="of each distillation")
    p.add_argument("--seeds", type=int, default=seeds, help="each is a seed of distillation and of sampling")
    p.add_argument("--samples", type=int, default=2000, help="images per distance")
    p.add_argument("--tiny", action="store_true", help="an untrained small teacher and 2 iterations, to try the script")
    return p


def parse(p: argparse.ArgumentParser) -> argparse.Namespace:
    """The flags given; a teacher that is missing is an error."""
    args = p.parse_args()
    if args.tiny:
        args.iterations, args.samples, args.teacher = min(args.iterations, 2), min(args.samples, 64), ""
    elif not Path(args.teacher).is_dir():
        p.error(
            f"no teacher at {args.teacher}; train one with: jaxdiff train --config=configs/digits.py "
            f"--workdir={args.teacher}"
        )
    return args


class DigitsStudy:
    """The teacher, loaded once, with the features of the data."""

    def __init__(self, args: argparse.Namespace, method: str = "sfd") -> None:
        self.args = args
        self.seeds = range(args.seeds)
        self.base = {"sfd": digits_sfd, "emd": digits_emd}[method].get_config("tiny" if args.tiny else "")
        use_compile_cache(self.base.compile_cache)
        with self.base.unlocked():
            self.base.teacher.path = args.teacher
        self.data = training.load_data(self.base)
        run = training.build(self.base, self.data)
        self.teacher = run.method.frozen["teacher"].load()
        self.quality = DigitQuality(run)
        self.measure = self.quality.measure
        network = teacher_model(run.model, 0)
        self.denoiser = lambda params: run.convention(bind(network, params))
        self._evaluate = jax.jit(lambda params, x, sigma, cond: self.denoiser(params)(x, sigma, cond))

    def noise(self, seed: int, count: int) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Unit noise and labels of a sampling seed."""
        unit, label = jax.random.split(jax.random.key(1000 + seed))
        shape = (count, *self.data.shape)
        return jax.random.normal(unit, shape), {"label": jax.random.randint(label, (count,), 0, 10)}

    def solve(
        self, solver: str, n: int, afs: bool, final_denoise: bool, t_min: float, unit: Any, cond: Any
    ) -> np.ndarray:
        """Samples of the teacher by a training-free solver on n timestamps.

        The network is compiled once and the loop is Python's, unlike in `solvers.solve`: dozens of variants run here.
        """
        method, sigmas = solvers.make(solver), solvers.grid(n, t_min, 80.0)
        denoise = partial(self._evaluate, self.teacher)
        x, past = jnp.float32(sigmas[0]) * unit, (jnp.zeros_like(unit),) * method.history
        for i in range(n - 1):
            row = {name: jnp.asarray(column[i], jnp.float32) for name, column in method.table(sigmas, np).items()}
            first = solvers.analytic_first_step if afs and i == 0 else denoise
            x, past = method.step(first, denoise, cond, x, past, row, None)
        return np.asarray(denoise(x, jnp.float32(sigmas[-1]), cond) if final_denoise else x)

    def heun(self, seed: int) -> tuple[np.ndarray, jax.Array]:
        """The teacher's own samples, by Heun at 35 evaluations, and their labels."""
        unit, cond = self.noise(seed, self.args.samples)
        return self.solve("heun", 18, False, True, 0.002, unit, cond), cond["label"]

    def sfd(self, nfe: Sequence[int], changes: dict[str, Any], iterations: int | None = None) -> Distillation:
        """A distillation by SFD for these numbers of evaluations."""
        changes = {**changes, "sfd.nfe": tuple(nfe)}
        afs = changes.get("sample.afs", self.base.sample.afs)
        return self.distil({**changes, "sample.timestamps": max(nfe) + 1 + int(afs)}, iterations)

    def distil(self, changes: dict[str, Any], iterations: int | None = None) -> Distillation:
        """A distillation by the base config with these changes."""
        return Distillation(self, changes, self.args.iterations if iterations is None else iterations)

    def teacher_seconds(self, timed: int = 50) -> float:
        """Seconds of the teacher's whole training, from `timed` of its steps; compilation and data are left out."""
        config = digits.get_config("tiny") if self.args.tiny else export.read_config(Path(self.args.teacher))
        loop = Loop(training.build(config, training.load_data(config)))
        _, seconds = loop.train(loop.init(0), repeat(loop.example), jax.random.split(jax.random.key(0), timed))
        return seconds / timed * config.train.steps

    def save(self, name: str, record: dict[str, Any], figure: Any = None) -> None:
        """NAME.json, with the settings and the base config, and NAME.png."""
        config = self.base.to_dict()
        config["teacher"]["path"] = ""
        settings = results.settings(self.args) | {
            "feature_sha256": self.quality.net.sha256,
            "reference_samples": len(self.quality.real),
            "config": config,
        }
        results.save(self.args.out, name, {"settings": settings, **record}, figure)


class Distillation:
    """A student's config and its compiled programs, kept over seeds."""

    def __init__(self, study: DigitsStudy, changes: dict[str, Any], iterations: int) -> None:
        self.study, self.iterations = study, iterations
        config = study.base.copy_and_resolve_references()
        if "lpips" in changes.get("sfd.loss", ""):
            changes = {**changes, "sfd.lpips.weights": study.args.lpips, "sfd.lpips.resize": 32}
        with config.unlocked():
            config.update_from_flattened_dict(changes)
            config.optim.decay_images = iterations * config.data.batch_size
        self.config = config
        self.run = training.build(config, study.data)
        self.loop = Loop(self.run)
        held = self.run.method.frozen
        self.frozen = {name: held[name].load() for name in held if name != "teacher"}
        self._samplers: dict[int | None, Any] = {}

    def init(self, seed: int, teacher: Any = None) -> TrainState:
        """The state before training."""
        given = self.study.teacher if teacher is None else teacher
        return self.loop.init(seed, {"teacher": given, **self.frozen})

    def train(self, seed: int, teacher: Any = None, **how: Any) -> tuple[Any, float]:
        """The student's parameters and the seconds of its training; `marks` and `watch` as in `Loop.train`."""
        keys = jax.random.split(jax.random.key(seed), self.iterations)
        state, seconds = self.loop.train(self.init(seed, teacher), repeat(self.loop.example), keys, **how)
        return exported(state), seconds

    def sample(self, params: Any, nfe: int | None, seed: int) -> np.ndarray:
        """Images of a sampling seed; `nfe` for students of several numbers of evaluations."""
        if nfe not in self._samplers:
            how = {} if nfe is None else {"nfe": nfe}
            self._samplers[nfe] = jax.jit(partial(self.run.method.sample, **how))
        return np.asarray(self._samplers[nfe](params, *self.study.noise(seed, self.study.args.samples)))

    def measure(self, params: Any, seed: int, nfe: int | None = None) -> dict[str, float]:
        """Scores of the images of a sampling seed."""
        labels = self.study.noise(seed, self.study.args.samples)[1]["label"]
        return self.study.measure(self.sample(params, nfe, seed), labels)

    def frechets(self) -> dict[int, list[float]]:
        """{evaluations: distances, one per seed}; each seed distils and samples anew."""
        students = {seed: self.train(seed)[0] for seed in self.study.seeds}
        return {
            nfe: [self.measure(student, seed, nfe)["frechet"] for seed, student in students.items()]
            for nfe in self.config.sfd.nfe
        }
