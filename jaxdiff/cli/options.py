"""Config overrides, --config.KEY=VALUE: listed keys, and further options of the chosen model, solver and so on."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from ml_collections import ConfigDict

from jaxdiff.cli.flags import UsageError, read_value
from jaxdiff.data import dataset
from jaxdiff.data.sources import SOURCES
from jaxdiff.errors import closest, nearest, pick
from jaxdiff.methods.averaging import DECAYS
from jaxdiff.models import MODELS
from jaxdiff.models import find as find_model
from jaxdiff.noise.levels import LEVELS, LOSS_WEIGHTS
from jaxdiff.outside import is_reference
from jaxdiff.solvers import SOLVERS
from jaxdiff.training.formats import RENAMED
from jaxdiff.training.optim import OPTIMIZERS

Value: TypeAlias = Any  # of a config key: a number, a string, None, or a tuple or ConfigDict of them
SIMPLE: dict[str, Value] = {"bool": False, "int": 0, "float": 0.0, "str": "", "tuple": ()}  # an example of each type


def override(config: ConfigDict, overrides: Sequence[tuple[str, str]]) -> None:
    """Set keys of the config in place; listed ones first, since they choose what the others belong to."""
    open_sections = (*OWNERS, *UNCHECKED)
    others = []
    for key, text in overrides:
        known = keys(config)
        section = next((name for name in open_sections if key.startswith(f"{name}.")), "")
        if key in known:
            _set(config, key, read_like(text, _at(config, key), f"--config.{key}"))
        elif key in open_sections:
            _set(config, key, ConfigDict(_dictionary(text, key)))
        elif section:
            others.append((section, key, text))
        else:
            raise UsageError(f"the config has no key {key!r}; {_hint(key, known)}")
    for section, key, text in others:
        _set(config, key, read_option(config, section, key, text))


def keys(config: ConfigDict, prefix: str = "") -> list[str]:
    """Every key with a value, as section.key."""
    names: list[str] = []
    for key, value in config.items():
        names += keys(value, f"{prefix}{key}.") if isinstance(value, ConfigDict) else [prefix + key]
    return names


def _at(config: ConfigDict, key: str) -> Value:
    value: Value = config
    for part in key.split("."):
        value = value[part]
    return value


def _set(config: ConfigDict, key: str, value: Value) -> None:
    section, _, name = key.rpartition(".")
    parent = config
    with config.unlocked():
        for part in section.split(".") if section else ():
            if part not in parent:
                parent[part] = ConfigDict()
            parent = parent[part]
        parent[name] = value


def _hint(key: str, known: list[str]) -> str:
    """Suggested keys: in the same section, by alias or name elsewhere, by spelling."""
    if key in RENAMED:
        return f"it is now {RENAMED[key]}"
    section, _, name = key.rpartition(".")
    named = {other.rpartition(".")[2] for other in known}
    here = closest(name, [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == section])
    near = [other for other in known if other.rpartition(".")[2] in (name, *closest(name, named))]
    near.sort(key=lambda other: difflib.SequenceMatcher(None, key, other).ratio(), reverse=True)
    found = list(dict.fromkeys([*(f"{section}.{other}" for other in here), *near, *closest(key, known, n=3)]))
    return f"did you mean {' or '.join(found[:3])}?" if found else "train --config=NAME --help lists all keys"


# ------------------------------------------------------------------------------------------ values


def read_like(text: str, like: Value, what: str) -> Value:
    """The text as a value of the type of `like`; for other types, a Python literal or else the text itself."""
    if isinstance(like, tuple):
        return _tuple(text, like, what)
    if isinstance(like, bool | int | float | str):
        return read_value(text, like, what)
    return _literal(text)


def _literal(text: str) -> Value:
    if text in ("true", "false"):
        return text == "true"
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return ConfigDict(value) if isinstance(value, dict) else value


def _tuple(text: str, like: tuple[Value, ...], what: str) -> tuple[Value, ...]:
    """(2, 3), 2,3 and 2 are all tuples, and so is left,right."""
    value = _literal(text) if text else ()
    if isinstance(value, str):
        value = value.split(",")
    parts = tuple(value) if isinstance(value, tuple | list) else (value,)
    if like and isinstance(like[0], float):
        parts = tuple(float(part) if isinstance(part, int) else part for part in parts)
    if like and not all(isinstance(part, type(like[0])) for part in parts):
        raise UsageError(f"{what}={text} is invalid: expected a tuple such as {like}")
    return parts


def _dictionary(text: str, key: str) -> dict[str, Value]:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = None
    if not isinstance(value, dict):
        raise UsageError(f'--config.{key} is a dict such as {{"name": 1}}; --config.{key}.name=1 sets one key')
    return value


# ------------------------------------------------------------------------------------------ open sections


class Owner(NamedTuple):
    """What an open section configures: the entry of `table` that the config selects by `key`."""

    key: str
    table: Mapping[str, Callable[..., object]]
    hidden: tuple[str, ...] = ()  # parameters set by the library
    common: Callable[..., object] | None = None  # takes further options


OWNERS = {
    "model.fields": Owner("model.name", MODELS, ("parent", "name")),
    "data.options": Owner("data.source", SOURCES, ("source", "seed", "log"), dataset.build),
    "sample.options": Owner("sample.solver", SOLVERS),
    "sfd.solver_options": Owner("sfd.solver", SOLVERS),
    "optim.options": Owner("optim.name", OPTIMIZERS, ("learning_rate",)),
    "ema.options": Owner("ema.kind", DECAYS),
    "teacher.fields": Owner("model.name", MODELS, ("parent", "name")),
    "diffusion.weight_options": Owner("diffusion.weight", LOSS_WEIGHTS),
}
for _name in ("emd", "diff_instruct", "sid", "dmd2", "f_distill", "uni_instruct"):
    OWNERS[f"{_name}.sigma_options"] = Owner(f"{_name}.sigma_sampler", LEVELS, ("table",))
    OWNERS[f"{_name}.score_weight_options"] = Owner(f"{_name}.score_weight", LOSS_WEIGHTS)
UNCHECKED = ("noise.assignment_options", "autoencoder.options", "curriculum", "log.wandb")  # checked by their builders


def read_option(config: ConfigDict, section: str, key: str, text: str) -> Value:
    """The value of section.NAME (or of NAME.FIELD, of an option that is a dict); unknown names are refused."""
    name, _, deeper = key.removeprefix(f"{section}.").partition(".")
    if section in UNCHECKED:
        return _literal(text)
    taken = parameters(config, section)
    chosen = _at(config, OWNERS[section].key)
    if name not in taken:
        raise UsageError(
            f"{OWNERS[section].key}={chosen!r} has no option {name!r}{nearest(name, taken)}; {section} accepts "
            f"{', '.join(taken) or 'nothing'}"
        )
    return _literal(text) if deeper else read_like(text, taken[name], f"--config.{key}")


def parameters(config: ConfigDict, section: str) -> dict[str, Value]:
    """The options of an open section, each with an example of its type, or None for any type."""
    owner = OWNERS[section]
    chosen = _at(config, owner.key)
    entry = find_model(chosen) if owner.table is MODELS else pick(owner.table, chosen, owner.key)
    taken = _signature(entry)
    if owner.common is not None:
        taken |= _signature(owner.common)
    return {name: example for name, example in taken.items() if name not in owner.hidden}


def unlisted(config: ConfigDict, section: str) -> list[str]:
    """The options of an open section that the config does not set."""
    chosen = _at(config, OWNERS[section].key)
    if chosen not in OWNERS[section].table and not is_reference(chosen):
        return []
    return [name for name in parameters(config, section) if name not in _at(config, section)]


def _signature(entry: Callable[..., object]) -> dict[str, Value]:
    """The fields of a dataclass, or the parameters of a function, with an example of each one's type."""
    if dataclasses.is_dataclass(entry):
        return {field.name: _example(field.type, field.default) for field in dataclasses.fields(entry)}
    listed = inspect.signature(entry).parameters.values()
    return {p.name: _example(p.annotation, p.default) for p in listed if p.kind is not p.VAR_KEYWORD}


def _example(annotation: object, default: object) -> Value:
    """A value of the annotated type, where it is a simple one; else the default, if that is."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    if text.startswith("str"):
        return ""
    if text in SIMPLE:
        return SIMPLE[text]
    if "None" in text or not isinstance(default, bool | int | float | str | tuple):
        return None
    return () if isinstance(default, tuple) else default
