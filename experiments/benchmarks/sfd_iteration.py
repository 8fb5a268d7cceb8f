"""One SFD iteration against the sum of its parts: teacher forwards and student forward-backwards, timed in one run.

    python -m experiments.benchmarks.sfd_iteration [--nfe=2] [--substeps=4] [--batch=64] [--rounds=20]

An iteration for E evaluations is K (E + 1) forwards of the teacher (DPM-Solver++(3M) evaluates once per step), E
gradients of the student and E updates. Iteration and parts take turns within each round; the median of the ratios is
printed. The network is that of configs/digits.py, the parts use XLA's own convolution gradients outside any loop.
"""

import argparse
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.benchmarks.timing import seconds, spread
from jaxdiff import denoisers, models
from jaxdiff.methods import Frozen, Parts, Teacher, optimizers, sfd
from jaxdiff.methods.method import update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"nfe": 2, "substeps": 4, "batch": 64, "rounds": 20}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    fields: dict[str, Any] = {"resolution": 8, "channels": 1, "width": 16, "channel_mult": (1, 2), "blocks": 1}
    model = models.UNet(**fields, attention=(4,), num_classes=10)
    x, cond = jnp.ones((options.batch, 8, 8, 1)), {"label": jnp.zeros(options.batch, jnp.int32)}
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), x, jnp.ones(options.batch), cond)["params"])
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: jnp.asarray(0.05 * rng.normal(size=s.shape), jnp.float32), shapes)
    optimizer = optax.adam(1e-4)

    def denoiser(params: Any) -> denoisers.Denoiser:
        return denoisers.edm(models.bind(model, params))

    parts = Parts(model, optimizers(optimizer), teacher=Teacher(denoiser, Frozen(dict, dict), own=True))
    method = sfd.build(sfd.Options(nfe=(options.nfe,), substeps=options.substeps), parts)
    batch = {"image": x, **cond}
    state = jax.jit(method.init)(jax.random.key(0), batch, {"teacher": params})
    iteration = jax.jit(method.step)
    forward = jax.jit(lambda params, x: denoiser(params)(x, 1.0, cond))

    def loss(params: Any) -> jax.Array:
        return jnp.abs(denoiser(params)(x, 1.0, cond) - x).sum() / options.batch

    @jax.jit
    def train(params: Any, opt_state: Any) -> Any:
        return update(optimizer, jax.grad(loss)(params), opt_state, params)

    forwards, opt_state = options.substeps * (options.nfe + 1), state.opt_state["student"]

    def once() -> list[float]:
        whole = seconds(lambda: iteration(state, batch, jax.random.key(1)))
        teacher = seconds(lambda: [jax.block_until_ready(forward(params, x)) for _ in range(forwards)])
        student = seconds(lambda: [jax.block_until_ready(train(params, opt_state)) for _ in range(options.nfe)])
        return [whole, teacher, student]

    once()  # compiles
    rounds = [once() for _ in range(options.rounds)]
    ratios = [whole / (teacher + student) for whole, teacher, student in rounds]
    whole, teacher, student = (1e3 * statistics.median(column) for column in zip(*rounds, strict=True))
    print(f"iteration {whole:.0f} ms; {forwards} forwards {teacher:.0f} ms, {options.nfe} updates {student:.0f} ms")
    print(
        f"iteration / parts: {spread(ratios)}, median and quartiles of {len(ratios)} rounds, "
        f"on {jax.devices()[0].device_kind}"
    )


if __name__ == "__main__":
    main()
