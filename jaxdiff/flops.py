"""FLOPs of a traced function: in total, or those that each of its outputs depends on.

Matrix products and convolutions count 2 per multiply-add; elementwise work is ignored. The body of a loop counts once
per iteration, a conditional as its most expensive branch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from jax.extend import core


def to_reach(closed: core.ClosedJaxpr) -> list[int]:
    """For each output of a traced function, the FLOPs of everything it depends on."""
    jaxpr = closed.jaxpr
    needed: dict[core.Var, int] = {}  # per variable: a bit for every costly equation it depends on
    prices: list[int] = []
    for equation in jaxpr.eqns:
        bits = 0
        for variable in equation.invars:
            if not isinstance(variable, core.Literal):
                bits |= needed.get(variable, 0)
        if price := _price(equation):
            bits |= 1 << len(prices)
            prices.append(price)
        needed.update(dict.fromkeys(equation.outvars, bits))
    outputs = [0 if isinstance(out, core.Literal) else needed.get(out, 0) for out in jaxpr.outvars]
    return [sum(price for i, price in enumerate(prices) if bits >> i & 1) for bits in outputs]


def total(jaxpr: core.Jaxpr) -> int:
    """The FLOPs of all equations."""
    return sum(_price(equation) for equation in jaxpr.eqns)


def _price(equation: core.JaxprEqn) -> int:
    name, parameters = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = parameters["dimension_numbers"]
        shape = _shape(equation.invars[0])
        return 2 * math.prod(_shape(equation.outvars[0])) * math.prod(shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel, axes = _shape(equation.invars[1]), parameters["dimension_numbers"].rhs_spec
        zeros = math.prod(parameters["lhs_dilation"])  # inserted by the gradient of a stride
        return 2 * math.prod(_shape(equation.outvars[0])) * math.prod(kernel) // kernel[axes[0]] // zeros
    if name.startswith("dot_product_attention_"):  # cuDNN's: two products forward; five backward, with q k' again
        q, k = _shape(equation.invars[0]), _shape(equation.invars[1])
        return 2 * (5 if "_bwd" in name else 2) * math.prod(q) * k[1]
    inner = [total(jaxpr) for jaxpr in _inner(parameters)]
    if name == "cond":
        return max(inner)
    if name == "scan":
        return sum(inner) * parameters.get("length", 1)
    if name == "pallas_call":  # the body is one step of the grid
        return sum(inner) * math.prod(parameters["grid_mapping"].grid)
    if name == "shard_map":  # the body is what one device does
        return sum(inner) * parameters["mesh"].size  # type: ignore[attr-defined]
    return sum(inner)


def _shape(variable: core.Var | core.Literal) -> tuple[int, ...]:
    return variable.aval.shape  # type: ignore[attr-defined]


def _inner(parameters: Mapping[str, object]) -> Iterator[core.Jaxpr]:
    for value in parameters.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, core.ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, core.Jaxpr):
                yield part
