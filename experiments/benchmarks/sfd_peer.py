"""An SFD iteration beside the same algorithm in PyTorch eager: same network, weights, noise and evaluations, CPU time.

    python -m experiments.benchmarks.sfd_peer [--only=unet16] [--rounds=5] [--threads=1] [--json=PATH]

A student of two evaluations with an analytic first step: the teacher takes 12 steps of DPM-Solver++(3M), the student
three Euler steps, two of them followed by an update. Without dropout both must report the same loss before they are
timed, since they then draw the same noise; then they take turns, with dropout.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from jaxdiff.cli import huge_pages

NFE, SUBSTEPS, RATE, DROPOUT = 2, 4, 5e-5, 0.13
CASES: dict[str, dict[str, Any]] = {
    "unet8": {"side": 8, "channels": 1, "batch": 64, "width": 32, "channel_mult": (1, 2), "blocks": 1},
    "unet16": {"side": 16, "channels": 4, "batch": 32, "width": 64, "channel_mult": (1, 2), "blocks": 1},
    "unet32": {"side": 32, "channels": 3, "batch": 8, "width": 64, "channel_mult": (1, 2, 2), "blocks": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="unet16,unet32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json")
    options = parser.parse_args()
    huge_pages.restart()
    found = measure(options.only.split(","), options.rounds, options.threads)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=2)


def measure(names: list[str], rounds: int, threads: int) -> dict[str, list[float]]:
    """Quartiles of the ratios, printed as they are measured."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])  # before JAX starts its threads
    import torch

    from experiments.benchmarks import timing

    torch.set_num_threads(threads)
    print(f"CPU time of an SFD iteration over PyTorch eager, {threads} thread(s), median (quartiles), {rounds} rounds")
    found = {}
    for name in names:
        ours, theirs, noise, label = pair(CASES[name], 0.0)
        losses = float(ours()), theirs(noise, label)
        if abs(losses[0] - losses[1]) > 1e-3 * abs(losses[1]):
            raise AssertionError(f"the first losses differ: {losses}")
        ours, theirs, noise, label = pair(CASES[name], DROPOUT)
        times = timing.turns({"ours": ours, "torch": partial(theirs, noise, label)}, rounds)
        found[name] = timing.quartiles([a / b for a, b in zip(times["ours"], times["torch"], strict=True)])
        print(f"{name:12s} {timing.spread_of(found[name])}, equal losses of {losses[1]:.2f}", flush=True)
    return found


def pair(case: dict[str, Any], dropout: float) -> tuple[Callable[[], Any], Callable[[Any, Any], float], Any, Any]:
    """Our iteration, which returns its loss, the other's, and the first noise and labels of ours."""
    import jax
    import jax.numpy as jnp
    import optax

    from experiments.benchmarks import torch_networks
    from jaxdiff import compilation, denoisers, models
    from jaxdiff.methods import Frozen, Parts, Sampling, Teacher, optimizers, sfd

    case = dict(case)
    side, batch = case.pop("side"), case.pop("batch")
    fields: dict[str, Any] = {**case, "resolution": side, "attention": (min(16, side // 2),), "num_classes": 10}
    model = models.UNet(**fields, dropout=dropout)
    data = {"image": jnp.zeros((batch, side, side, case["channels"])), "label": jnp.zeros(batch, jnp.int32)}
    inputs = jax.random.key(0), data["image"], jnp.ones(batch), {"label": data["label"]}
    shapes = jax.eval_shape(lambda: model.init(*inputs)["params"])
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: jnp.asarray(0.05 * rng.normal(size=s.shape), jnp.float32), shapes)
    teacher = Teacher(lambda params: denoisers.edm(models.bind(model, params)), Frozen(dict, dict), own=True)
    parts = Parts(model, optimizers(optax.adam(RATE)), teacher=teacher, sampling=Sampling(afs=True))
    method = sfd.build(sfd.Options(nfe=(NFE,), substeps=SUBSTEPS), parts)
    states = [jax.jit(method.init)(jax.random.key(0), data, {"teacher": params})]
    program = jax.jit(method.step, donate_argnums=0, compiler_options=compilation.options("cpu"))
    key = jax.random.key(1)

    def ours() -> Any:
        state, metrics = program(states.pop(), data, key)
        states.append(state)
        return metrics["loss"]

    _, drawn, labels, _ = jax.random.split(key, 4)  # as sfd.FewSteps.step draws them
    noise = np.asarray(jax.random.normal(drawn, data["image"].shape))
    label = np.asarray(jax.random.randint(labels, (batch,), 0, 10))
    networks = [torch_networks.UNet(**fields, dropout=dropout) for _ in range(2)]
    for network in networks:
        torch_networks.load(network, params)
    return ours, peer(*networks), noise, label


def peer(teacher: Any, student: Any) -> Callable[[Any, Any], float]:
    """The iteration in PyTorch, which returns the mean loss of its updates."""
    import torch

    teacher.eval().requires_grad_(False)
    student.train()
    optimizer = torch.optim.Adam(student.parameters(), lr=RATE)
    fine = polynomial(SUBSTEPS * (NFE + 1) + 1)
    coarse = fine[::SUBSTEPS]
    rows = [multistep(fine, i) for i in range(len(fine) - 1)]

    def denoise(network: Any, x: Any, sigma: float, label: Any) -> Any:
        total = sigma**2 + 0.25
        noise_label = torch.full((len(x),), math.log(sigma) / 4)
        return 0.25 / total * x + 0.5 * sigma / math.sqrt(total) * network(x / math.sqrt(total), noise_label, label)

    def targets(x: Any, label: Any) -> list[Any]:
        past: list[Any] = []
        kept = []
        for i, row in enumerate(rows):
            past = [denoise(teacher, x, fine[i], label), *past[:2]]
            x = row[0] * x + sum(b * m for b, m in zip(row[1], past, strict=False))
            if (i + 1) % SUBSTEPS == 0:
                kept.append(x)
        return kept

    def iteration(noise: Any, label: Any) -> float:
        x = coarse[0] * torch.from_numpy(noise.copy()).permute(0, 3, 1, 2).contiguous()
        label = torch.from_numpy(label.copy()).long()
        with torch.no_grad():
            wanted = targets(x, label)
        first = coarse[1] / coarse[0]
        x = first * x + (1 - first) * x * (1 - coarse[0] / math.sqrt(1 + coarse[0] ** 2))
        losses = []
        for k in range(1, NFE + 1):
            ratio = coarse[k + 1] / coarse[k]
            optimizer.zero_grad()
            made = ratio * x + (1 - ratio) * denoise(student, x, coarse[k], label)
            loss = (made - wanted[k]).abs().sum() / len(x)
            loss.backward()
            for p in student.parameters():
                if p.grad is not None:
                    torch.nan_to_num(p.grad, nan=0, posinf=1e5, neginf=-1e5, out=p.grad)
            optimizer.step()
            x = made.detach()
            losses.append(float(loss.detach()))
        return float(np.mean(losses))

    return iteration


def polynomial(n: int, low: float = 0.006, high: float = 80.0) -> list[float]:
    """n noise levels whose seventh roots are evenly spaced."""
    ends = high ** (1 / 7), low ** (1 / 7)
    return [(ends[0] + i / (n - 1) * (ends[1] - ends[0])) ** 7 for i in range(n)]


def multistep(levels: list[float], i: int) -> tuple[float, list[float]]:
    """DPM-Solver++(3M): x' = a x + b0 D + b1 D_1 + b2 D_2, of lower order at the ends."""
    t, s = levels[i], levels[i + 1]
    order = i + 1 if i < 2 else min(3, len(levels) - 1 - i)
    h = math.log(t / s)
    one = math.expm1(-h)
    if order == 1:
        return s / t, [-one]
    r0 = math.log(levels[i - 1] / t) / h
    if order == 2:
        return s / t, [-one * (1 + 0.5 / r0), one * 0.5 / r0]
    r1 = math.log(levels[i - 2] / levels[i - 1]) / h
    two = one / h + 1
    three = two / h - 0.5
    a = two * (1 + r0 / (r0 + r1)) - three / (r0 + r1)
    b = (three - two * r0) / (r0 + r1)
    return s / t, [-one + a / r0, -a / r0 + b / r1, -b / r1]


if __name__ == "__main__":
    main()
