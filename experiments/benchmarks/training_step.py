"""Training steps beside PyTorch eager: the same network, weights and batch, CPU time in one run.

    python -m experiments.benchmarks.training_step [--only=unet32] [--rounds=7] [--threads=1]

Each case times a forward, a forward with gradient, and the whole training step (EDM loss, Adam, average of the
parameters) of both; JAX and PyTorch take turns within each round, and the median of the ratios is printed. Ours is
compiled and gives its state away as the trainer's does, and both run with huge pages, as `jaxdiff train` does. The two
networks must first return the same values. Needs torch, which jaxdiff does not install.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

from jaxdiff.cli import huge_pages

CASES: dict[str, dict[str, Any]] = {
    "unet8": {"side": 8, "channels": 1, "batch": 64, "width": 32, "channel_mult": (1, 2), "blocks": 1},
    "unet16": {"side": 16, "channels": 4, "batch": 64, "width": 64, "channel_mult": (1, 2), "blocks": 1},
    "unet32": {"side": 32, "channels": 3, "batch": 64, "width": 32, "channel_mult": (1, 2, 2), "blocks": 1},
    "unet32 wide": {"side": 32, "channels": 3, "batch": 16, "width": 64, "channel_mult": (1, 2, 2), "blocks": 2},
    "dit": {"side": 32, "channels": 3, "batch": 64, "width": 192, "depth": 6, "heads": 3, "patch": 4},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--json")
    options = parser.parse_args()
    huge_pages.restart()
    found = measure(options.only.split(","), options.rounds, options.threads, options.dropout)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=2)


def measure(names: list[str], rounds: int, threads: int, dropout: float = 0.0) -> dict[str, dict[str, Any]]:
    """Median and quartiles of the ratios of each case, printed as they are measured."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])  # before JAX starts its threads
    from experiments.benchmarks import timing

    found: dict[str, dict[str, Any]] = {}
    print(f"CPU time of jaxdiff over PyTorch eager, {threads} thread(s), median (quartiles) of {rounds} rounds")
    for name in names:
        ours, theirs, parameters, gap = pair(CASES[name], threads, dropout)
        times = timing.turns({**{f"jax {k}": f for k, f in ours.items()}, **theirs}, rounds)
        found[name] = {
            kind: timing.quartiles([a / b for a, b in zip(times[f"jax {kind}"], times[kind], strict=True)])
            for kind in theirs
        }
        ratios = ", ".join(f"{kind} {timing.spread_of(value)}" for kind, value in found[name].items())
        print(f"{name:12s} {parameters / 1e6:5.2f} M parameters, outputs differ by {gap:.0e}: {ratios}", flush=True)
    return found


Actions = dict[str, Callable[[], Any]]


def pair(case: dict[str, Any], threads: int, dropout: float) -> tuple[Actions, Actions, int, float]:
    """The actions of both libraries, the number of parameters and the largest difference of outputs."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import torch

    from experiments.benchmarks import torch_networks
    from jaxdiff import compilation, denoisers, models
    from jaxdiff.methods import Parts, averaging, diffusion, optimizers
    from jaxdiff.models import embeddings

    torch.set_num_threads(threads)
    case = dict(case)
    side, batch, channels = case.pop("side"), case.pop("batch"), case["channels"]
    if "patch" in case:
        model: Any = models.DiT(num_classes=10, learn_variance=False, **case)
        count = side // case["patch"]
        positions = embeddings.sincos_positions(count, count, case["width"]).reshape(-1, case["width"])
        network: Any = torch_networks.DiT(num_classes=10, positions=positions, **case)
    else:
        fields = {**case, "resolution": side, "attention": (min(16, side // 2),), "num_classes": 10, "dropout": dropout}
        model, network = models.UNet(**fields), torch_networks.UNet(**fields)

    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch, side, side, channels)).astype(np.float32)
    sigma = np.exp(rng.normal(size=batch)).astype(np.float32)
    cond = {"label": jnp.arange(batch) % 10}
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), x, jnp.ones(batch), cond)["params"])
    params = jax.tree.map(lambda s: jnp.asarray(0.05 * rng.normal(size=s.shape), jnp.float32), shapes)
    torch_networks.load(network, params)

    method = diffusion.build(
        diffusion.Options(), Parts(model, optimizers(optax.adam(1e-4)), average=averaging.constant(0.999))
    )
    data = {"image": jnp.asarray(x), **cond}
    state = jax.jit(method.init)(jax.random.key(0), data)
    chosen = compilation.options("cpu")
    program = jax.jit(method.step, donate_argnums=0, compiler_options=chosen)
    states = [state.replace(params={"student": jax.tree.map(jnp.copy, params)})]

    def step() -> Any:
        made, metrics = program(states.pop(), data, jax.random.key(2))
        states.append(made)
        return made, metrics

    def loss(params: Any, x: Any) -> Any:
        return jnp.square(denoisers.edm(models.bind(model, params, dropout=jax.random.key(1)))(x, sigma, cond)).mean()

    forward = jax.jit(
        lambda params, x: denoisers.edm(models.bind(model, params))(x, sigma, cond), compiler_options=chosen
    )
    gradient = jax.jit(jax.grad(loss), compiler_options=chosen)
    image = jnp.asarray(x)
    ours = {
        "forward": lambda: forward(params, image),
        "gradient": lambda: gradient(params, image),
        "step": step,
    }
    theirs = torch_actions(network, x, sigma)
    with torch.no_grad():
        made = theirs["forward"]().permute(0, 2, 3, 1).numpy()
    gap = float(np.abs(np.asarray(ours["forward"]()) - made).max())
    if gap > 1e-3:
        raise AssertionError(f"the two networks differ by {gap}")
    return ours, theirs, sum(p.size for p in jax.tree.leaves(params)), gap


def torch_actions(network: Any, x: Any, sigma: Any) -> Actions:
    """The same three actions in PyTorch eager, NCHW."""
    import torch

    image = torch.from_numpy(x).permute(0, 3, 1, 2).contiguous()
    level = torch.from_numpy(sigma)
    label = torch.arange(len(x)) % 10
    average = [p.detach().clone() for p in network.parameters()]
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4)

    def denoise(x: Any, sigma: Any) -> Any:
        s = sigma[:, None, None, None]
        total = s**2 + 0.25
        out = network(x / total.sqrt(), sigma.log() / 4, label)
        return 0.25 / total * x + 0.5 * s / total.sqrt() * out

    def forward() -> Any:
        network.eval()
        with torch.no_grad():
            return denoise(image, level)

    def gradient() -> None:
        network.train()
        network.zero_grad()
        denoise(image, level).square().mean().backward()

    def step() -> None:
        network.train()
        optimizer.zero_grad()
        s = torch.exp(torch.randn(len(image)) * 1.2 - 1.2)
        noisy = image + s[:, None, None, None] * torch.randn_like(image)
        weight = (s**2 + 0.25) / (0.5 * s) ** 2
        error = (denoise(noisy, s) - image).square().flatten(1).mean(1)
        (weight * error).mean().backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(average, list(network.parameters()), 1e-3)

    return {"forward": forward, "gradient": gradient, "step": step}


if __name__ == "__main__":
    main()
