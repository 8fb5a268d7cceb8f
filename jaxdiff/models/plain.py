"""Networks from outside the package as models: two functions, an NNX module, or a Linen module of another signature.

    Plain(init, apply)          init(key) -> params;  apply(params, x, noise_label, cond) -> array
    from_nnx(make)              make(key) -> nnx.Module, called as module(x, noise_label, cond)
    a Linen class               called as module(x, noise_label, cond)

`model_class` gives each the interface of the package's models: `channels`, `num_classes`, `signals()`, `init`, `apply`.
The network receives cond = {"label": [b]} or None; label num_classes means no class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from jax import Array

from jaxdiff.conditions import Signal, label_signal
from jaxdiff.denoisers import Cond
from jaxdiff.trees import Params


@dataclass(frozen=True)
class Plain:
    """A network as two functions of its parameters, any pytree of arrays in dicts and lists."""

    init: Callable[[Array], Params]
    apply: Callable[..., Array]

    def module(self, channels: int = 1, num_classes: int = 0) -> nn.Module:
        """The network as a model of the package."""
        return model_class(self)(channels=channels, num_classes=num_classes)


def from_nnx(make: Callable[[Array], nnx.Module]) -> Plain:
    """The network of NNX modules; parameters are its nnx.Param as a dict."""

    def parts(key: Array) -> Any:
        return nnx.split(make(key), nnx.Param, ...)  # graph, parameters, the rest

    def init(key: Array) -> Params:
        return nnx.to_pure_dict(parts(key)[1])

    def apply(params: Params, x: Array, noise_label: Array, cond: Cond = None) -> Array:
        graph, state, rest = parts(jax.random.key(0))  # its initial values are not used, so the compiler drops them
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state, rest)(x, noise_label, cond)

    return Plain(init, apply)


def is_native(network: type[nn.Module]) -> bool:
    """Whether a Linen class has the interface of the package's models."""
    return hasattr(network, "signals") and "channels" in network.__dataclass_fields__


def model_class(network: Any, name: str = "") -> type[nn.Module]:
    """A class of models from a Plain or a Linen class; the same class each time."""
    return _model_class(network, name)


@cache
def _model_class(network: Any, name: str) -> type[nn.Module]:
    if isinstance(network, Plain):
        return _of_functions(network, name.rpartition(":")[2] or "Plain")
    if isinstance(network, type) and issubclass(network, nn.Module):
        return network if is_native(network) else _of_linen(network)
    given = getattr(network, "__name__", type(network).__name__)
    raise TypeError(
        f"{name or given} is no network: give a Flax class, models.Plain(init, apply) for functions init(key) and "
        "apply(params, x, noise_label, cond), or models.from_nnx(make) for NNX"
    )


def adapted(network: nn.Module | Plain, channels: int, num_classes: int) -> nn.Module:
    """A network as a model of the package; a Linen module that has its interface stays as it is."""
    if isinstance(network, Plain):
        return network.module(channels, num_classes)
    made = model_class(type(network))
    if made is type(network):
        return network
    return made(**{"channels": channels, "num_classes": num_classes, **fields_of(network)})


def fields_of(network: nn.Module) -> dict[str, Any]:
    """The fields of a module that differ from their defaults."""
    found = {}
    for name, field in type(network).__dataclass_fields__.items():
        value = getattr(network, name)
        if name not in ("parent", "name") and field.init and value is not field.default and value != field.default:
            found[name] = value
    return found


def _signals(self: Any) -> dict[str, Signal]:
    return {"label": label_signal(self.num_classes)} if self.num_classes else {}


def _of_functions(network: Plain, name: str) -> type[nn.Module]:
    def init(self: nn.Module, key: Array, *inputs: Any, **how: Any) -> dict[str, Params]:
        return {"params": network.init(key)}

    def apply(
        self: nn.Module, variables: Any, x: Array, noise_label: Array, cond: Cond = None, *_: Any, **how: Any
    ) -> Array:
        if how.get("mutable"):
            raise ValueError(
                f"the network {name} is made of functions and has no named activations, which a discriminator's head "
                "or feature extraction needs; give a Linen module that taps them (models.taps), or use another method"
            )
        return network.apply(variables["params"], x, noise_label, cond)

    fields = {"__annotations__": {"channels": int, "num_classes": int}, "channels": 1, "num_classes": 0}
    methods = {"signals": nn.nowrap(_signals), "init": nn.nowrap(init), "apply": nn.nowrap(apply)}
    return type(name, (nn.Module,), {"__module__": __name__, **fields, **methods})


def _of_linen(network: type[nn.Module]) -> type[nn.Module]:
    def init(self: nn.Module, key: Array, x: Array, noise_label: Array, cond: Cond = None) -> Any:
        return network.init(self, key, x, noise_label, cond)

    def apply(
        self: nn.Module,
        variables: Any,
        x: Array,
        noise_label: Array,
        cond: Cond = None,
        *,
        deterministic: bool = True,
        rngs: Any = None,
        **how: Any,
    ) -> Any:
        return network.apply(self, variables, x, noise_label, cond, rngs=rngs, **how)

    known = network.__dataclass_fields__
    added = {field: value for field, value in (("channels", 1), ("num_classes", 0)) if field not in known}
    methods = {"init": nn.nowrap(init), "apply": nn.nowrap(apply)}
    if not hasattr(network, "signals"):
        methods["signals"] = nn.nowrap(_signals)
    body = {"__module__": network.__module__, "__annotations__": dict.fromkeys(added, int), **added, **methods}
    return type(network.__name__, (network,), body)
