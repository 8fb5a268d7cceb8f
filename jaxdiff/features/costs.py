"""Multiply-add counts of a traced function: of all of it, or of what one of its outputs needs.

A product of two arrays counts 2 per multiply-add, in matrix products and convolutions; elementwise work is left out. A
loop counts its body as often as it runs, a branch its dearest arm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jax.extend import core


def to_reach(closed: core.ClosedJaxpr) -> list[int]:
    """For each output of a traced function, the operations of all that it depends on."""
    jaxpr = closed.jaxpr
    needed: dict[Any, int] = {}  # of each variable: a bit for every costly equation before it
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
    """The operations of every equation."""
    return sum(_price(equation) for equation in jaxpr.eqns)


def _price(equation: Any) -> int:
    name, parameters = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = parameters["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel, axes = equation.invars[1].aval.shape, parameters["dimension_numbers"].rhs_spec
        zeros = math.prod(parameters["lhs_dilation"])  # the gradient of a stride multiplies them, nobody needs to
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) // kernel[axes[0]] // zeros
    inner = [total(jaxpr) for jaxpr in _inner(parameters)]
    if name == "cond":
        return max(inner)
    return sum(inner) * parameters.get("length", 1) if name == "scan" else sum(inner)


def _inner(parameters: dict[str, Any]) -> Iterator[core.Jaxpr]:
    for value in parameters.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, core.ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, core.Jaxpr):
                yield part
