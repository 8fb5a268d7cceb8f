"""Single convolutions: the library's choice over XLA's own form and over PyTorch eager, CPU time in one run.

    python -m experiments.benchmarks.convolutions [--quick] [--rounds=7] [--threads=1] [--json=PATH]

Forward, input gradient and weight gradient of 1x1, 3x3 and strided 3x3 convolutions, for sides 8 to 64, channels 16 to
256 and batches 16 to 128, up to MOST_PRODUCTS and MOST_VALUES. All forms take turns in each round; printed are medians
of ratios. `ours` is `convolution.conv` compiled as training steps are; `loop` is
`convolution.loop_conv` in a `lax.scan`, over the same as `ours` outside of one. PyTorch is left out where it is not
installed. --quick takes the corners of the sweep.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jaxdiff.cli import huge_pages

SIDES, CHANNELS, BATCHES = (8, 16, 32, 64), (16, 32, 64, 128, 256), (16, 64, 128)
MOST_PRODUCTS, MOST_VALUES = 8e9, 2**25  # of one convolution: multiply-adds, numbers in its input
SCANNED = 3  # calls in a loop
WINDOW = 0.02  # CPU seconds a measurement lasts at least
KINDS = ("forward", "input", "weight")


class Case(NamedTuple):
    side: int
    channels: int
    batch: int
    kernel: int = 3
    stride: int = 1

    def __str__(self) -> str:
        stride = f" / {self.stride}" if self.stride > 1 else ""
        return f"{self.kernel}x{self.kernel}{stride} {self.batch} x {self.side}^2 x {self.channels}"

    @property
    def products(self) -> float:
        return self.batch * (self.side * self.kernel * self.channels / self.stride) ** 2

    @property
    def values(self) -> int:
        return self.batch * self.side**2 * self.channels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="eight convolutions")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json")
    options = parser.parse_args()
    huge_pages.restart()
    found = measure(options.quick, options.rounds, options.threads)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=2)


def cases(quick: bool) -> list[Case]:
    """The sweep, smallest first."""
    if quick:
        shapes = itertools.product((8, 32), (32, 128), (16,))
        return [Case(*shape, kernel) for shape in shapes for kernel in (1, 3)]
    forms = ((1, 1), (3, 1), (3, 2))
    swept = [Case(*shape, *form) for form in forms for shape in itertools.product(SIDES, CHANNELS, BATCHES)]
    kept = [case for case in swept if case.products <= MOST_PRODUCTS and case.values <= MOST_VALUES]
    return sorted(kept, key=lambda case: (case.kernel, case.stride, case.products))


def measure(quick: bool, rounds: int, threads: int) -> dict[str, dict[str, Any]]:
    """Quartiles of the ratios of each case and kind, printed as they are measured."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])  # before JAX starts its threads
    from experiments.benchmarks import timing

    print(f"CPU time of `ours`, {threads} thread(s), median of {rounds} rounds; `loop` in a scan over `ours` outside")
    columns = "".join(f"{kind + ' ms':>13s}{'/ XLA':>7s}{'/ torch':>8s}{'loop':>6s}" for kind in KINDS)
    print(f"{'':26s}{columns}")
    found: dict[str, dict[str, Any]] = {}
    for case in cases(quick):
        row: dict[str, Any] = {}
        for kind in KINDS:
            forms = jax_forms(case, kind) | torch_forms(case, kind, threads)
            times = timing.turns(forms, rounds, WINDOW)
            times["loop"] = [t / SCANNED for t in times.get("loop", [])]
            pairs = {"XLA": ("ours", "xla"), "torch": ("ours", "torch"), "loop": ("loop", "ours")}
            row[kind] = {
                name: timing.quartiles([x / y for x, y in zip(times[a], times[b], strict=True)])
                for name, (a, b) in pairs.items()
                if times.get(a) and times.get(b)
            }
            row[kind]["ms"] = 1e3 * timing.quartiles(times["ours"])[1]
        found[str(case)] = row
        print(f"{case!s:26s}" + "".join(_columns(row[kind]) for kind in KINDS), flush=True)
    return found


def _columns(ratios: dict[str, Any]) -> str:
    cells = [f"{ratios[name][1]:.2f}" if name in ratios else "-" for name in ("XLA", "torch", "loop")]
    return f"{ratios['ms']:13.2f}{cells[0]:>7s}{cells[1]:>8s}{cells[2]:>6s}"


Forms = dict[str, Callable[[], Any]]


def jax_forms(case: Case, kind: str) -> Forms:
    """One call of each form in JAX; the loop makes SCANNED."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxdiff import compilation
    from jaxdiff.models import convolution

    rng = np.random.default_rng(0)
    pad, out = case.kernel // 2, case.side // case.stride

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    x = normal(case.batch, case.side, case.side, case.channels)
    kernel = normal(case.kernel, case.kernel, case.channels, case.channels)
    g = normal(case.batch, out, out, case.channels)
    settings: dict[str, Any] = {"window_strides": (case.stride,) * 2, "padding": ((pad, pad),) * 2}
    settings["dimension_numbers"] = ("NHWC", "HWIO", "NHWC")

    def program(form: Callable[..., Any]) -> Callable[..., Any]:
        def convolve(x: Any, kernel: Any) -> Any:
            window = settings["window_strides"]
            return form(x, kernel, window, settings["padding"], dimension_numbers=settings["dimension_numbers"])

        def run(x: Any, kernel: Any, g: Any) -> Any:
            if kind == "forward":
                return convolve(x, kernel)
            if kind == "input":
                return jax.vjp(lambda x: convolve(x, kernel), x)[1](g)[0]
            return jax.vjp(lambda kernel: convolve(x, kernel), kernel)[1](g)[0]

        return run

    chosen = compilation.options(jax.default_backend())
    ours = jax.jit(program(convolution.conv), compiler_options=chosen)
    plain = jax.jit(program(jax.lax.conv_general_dilated))
    looped = program(convolution.loop_conv)

    @partial(jax.jit, compiler_options=chosen)
    def scanned(scales: Any, x: Any, kernel: Any, g: Any) -> Any:
        return jax.lax.map(lambda scale: looped(scale * x, kernel, scale * g), scales)

    scales = normal(SCANNED)
    forms: Forms = {"ours": lambda: ours(x, kernel, g), "xla": lambda: plain(x, kernel, g)}
    if case.stride == 1:
        forms["loop"] = lambda: scanned(scales, x, kernel, g)
    return forms


def torch_forms(case: Case, kind: str, threads: int) -> Forms:
    """The same in PyTorch, in channels-first order as its users have them."""
    if importlib.util.find_spec("torch") is None:
        return {}
    import torch

    torch.set_num_threads(threads)
    pad = case.kernel // 2
    x = torch.randn(case.batch, case.channels, case.side, case.side)
    weight = torch.randn(case.channels, case.channels, case.kernel, case.kernel)
    made = torch.nn.functional.conv2d(x, weight, stride=case.stride, padding=pad)

    def forward() -> Any:
        with torch.no_grad():
            return torch.nn.functional.conv2d(x, weight, stride=case.stride, padding=pad)

    def backward(wanted: list[bool]) -> Any:
        settings = [case.stride] * 2, [pad] * 2, [1, 1], False, [0, 0], 1, [*wanted, False]
        return torch.ops.aten.convolution_backward(made, x, weight, None, *settings)

    actions = {"forward": forward, "input": lambda: backward([True, False]), "weight": lambda: backward([False, True])}
    return {"torch": actions[kind]}


if __name__ == "__main__":
    main()
