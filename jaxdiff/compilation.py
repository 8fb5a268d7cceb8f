"""Compiler options of the large programs, by platform.

CPU  XLA hands convolutions, products and reductions to a library, YNNPACK, which is slower than XLA's own code at
     weight gradients of convolutions and at the reductions of group norms (`experiments.benchmarks.training_step`),
     and at the convolutions of feature networks (`experiments.evaluation.inception_parity`).
TPU  `gather_first`: the compiler may split a product with a sharded kernel into one per shard, to overlap them with
     communication, and read the activations again for each. The first option stops that, the second avoids an internal
     error of libtpu 0.0.51 that the first leads to. Both are undocumented, so a config has to ask for them.
"""

from __future__ import annotations

from functools import cache

import jax

Options = dict[str, bool | int | float | str]

CPU: Options = {"xla_cpu_experimental_ynn_fusion_type": ""}
GATHER_FIRST: Options = {
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "false",
}


def options(platform: str, gather_first: bool = False) -> Options | None:
    """Options for `jax.jit` of a program that runs on `platform`; None: the compiler's defaults."""
    if platform == "cpu" and _cpu_knows():
        return CPU
    if platform == "tpu" and gather_first:
        return GATHER_FIRST
    return None


@cache
def _cpu_knows() -> bool:
    """Whether this version of XLA has the options: names come and go between releases."""
    try:
        jax.jit(lambda: 0, compiler_options=CPU).lower().compile()
    except (jax.errors.JaxRuntimeError, ValueError):
        return False
    return True
