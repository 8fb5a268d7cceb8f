"""Feature networks by name, and their features over a stream of images: jitted once, sharded where asked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxdiff.errors import pick
from jaxdiff.evaluation import classifier, efficientnet, inception
from jaxdiff.evaluation.frechet import Moments, update
from jaxdiff.evaluation.report import digest
from jaxdiff.evaluation.resize import KINDS, as_float


class FeatureNet(NamedTuple):
    """A network to measure in: what a protocol says of it, and the function itself."""

    name: str
    sha256: str  # of the file its weights come from
    resize: str  # kind and side, "bilinear-299"; "none" where images are taken as they are
    apply: Callable[[Any], dict[str, Any]]  # images uint8 or [-1, 1], NHWC -> features [b, d], probabilities or None


class Extracted(NamedTuple):
    """Moments of the features, and on request the features and probabilities of every image, in order."""

    moments: Moments
    features: np.ndarray | None = None
    probabilities: np.ndarray | None = None


# ------------------------------------------------------------------------------------------ the networks


def feature_net(
    name: str, path: str | os.PathLike | None = None, *, resize: str = "bilinear", side: int | None = None
) -> FeatureNet:
    """A feature network by name: `inception` and `efficientnet_lite0` with their weights at `path`, or `digits`.

    `resize` and `side` say how images reach the size the network sees; change them knowingly, the numbers change too.
    The result's `apply` is a pytree that carries the weights, so it can be an argument of a jitted function.
    """
    return pick(NETS, name, "feature network")(name, path, resize, side)


def _digits(name: str, path: Any, resize: str, side: int | None) -> FeatureNet:
    model, params, sha256 = classifier.load(path)
    return FeatureNet(name, sha256, "none", jax.tree_util.Partial(_apply(model.apply, as_float), params))


def _inception(name: str, path: Any, resize: str, side: int | None) -> FeatureNet:
    """Probabilities leave the bias of the logits out, as every published Inception score does."""

    def unbiased(variables: Any, x: Any) -> dict[str, Any]:
        out = model.apply(variables, x)
        return {**out, "logits": out["logits"] - variables["params"]["fc"]["bias"]}

    model, params, sha256 = _load(name, path)
    return _photo_net(name, sha256, unbiased, params, inception, resize, side)


def _efficientnet(name: str, path: Any, resize: str, side: int | None) -> FeatureNet:
    model, params, sha256 = _load(name, path)
    return _photo_net(name, sha256, model.apply, params, efficientnet, resize, side)


NETS: dict[str, Callable[[str, Any, str, int | None], FeatureNet]] = {
    "inception": _inception,
    "efficientnet_lite0": _efficientnet,
    "digits": _digits,
}
SOURCES = {
    "inception": "get pt_inception-2015-12-05 of pytorch-fid (mseitzer/pytorch-fid, release fid_weights) and, where "
    "torch is installed, write its state dict: safetensors.torch.save_file(torch.load(name), 'inception.safetensors')",
    "efficientnet_lite0": "get the ImageNet weights of EfficientNet-Lite0, fold each batch norm into the convolution "
    "before it, save HWIO kernels and biases as stem, block0..15.{expand,depthwise,project}, head, fc in one .npz",
}


def _load(name: str, path: Any) -> tuple[Any, Any, str]:
    """Model, parameters and hash, or what to get and how to convert it."""
    from jaxdiff import weights  # here, since weights import the models of this package

    if path is None or not Path(path).is_file():
        where = "no path was given" if path is None else f"there is no file {Path(path).resolve()}"
        raise FileNotFoundError(f"feature network {name!r} needs its weights, but {where}: {SOURCES[name]}")
    return *weights.load(path, name), digest(path)


def _photo_net(name: str, sha256: str, call: Any, params: Any, module: Any, kind: str, side: int | None) -> FeatureNet:
    """A network for photographs behind its own preprocessing."""
    side = module.SIDE if side is None else side
    pick(KINDS, kind, "resize kind")
    apply = _apply(call, lambda images: module.preprocess(images, kind, side))
    return FeatureNet(name, sha256, f"{kind}-{side}", jax.tree_util.Partial(apply, params))


def _apply(call: Callable, prepare: Callable[[Any], Any]) -> Callable[[Any, Any], dict[str, Any]]:
    def apply(params: Any, images: Any) -> dict[str, Any]:
        out = call({"params": params}, prepare(images))
        return {"features": out["features"], "probabilities": jax.nn.softmax(out["logits"])}

    return apply


# ------------------------------------------------------------------------------------------ running them


def extract(
    net: FeatureNet,
    batches: Iterable[Any],
    sharding: NamedSharding | None = None,
    *,
    batch_size: int | None = None,
    keep: bool = False,
) -> Extracted:
    """Features of every image in `batches` (arrays, or dicts with `image`), as moments; `keep` returns them all too.

    Each call of the network sees `batch_size` images (default: those of the first batch), the last ones padded, so it
    is compiled once. With `sharding` images are laid out over its devices along the first axis, the weights copied to
    each. With several processes each feeds its own images, equally many batches, and all get the moments of all.
    """
    mesh = None if sharding is None else sharding.mesh
    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    apply = net.apply if everywhere is None else jax.device_put(net.apply, everywhere)
    run = jax.jit(_run, out_shardings=everywhere)
    pieces = _pieces(batches, batch_size, _shards(sharding))
    moments, kept = None, []
    for out in _delayed(run(apply, *_place(piece, sharding)) for piece in pieces):
        rows = {name: np.asarray(value) for name, value in out.items() if value is not None}
        rows = {name: value[rows["valid"]] for name, value in rows.items()}
        moments = update(moments, rows["features"])
        kept += [rows] * keep
    if moments is None:
        raise ValueError("no images to extract features from: the iterable of batches is empty (or was used up before)")
    if not keep:
        return Extracted(moments)
    every = {name: np.concatenate([rows[name] for rows in kept]) for name in kept[0]}
    return Extracted(moments, every["features"], every.get("probabilities"))


def _run(apply: Any, images: Any, valid: Any) -> dict[str, Any]:
    return {**apply(images), "valid": valid}


def _delayed(outputs: Iterator[Any]) -> Iterator[Any]:
    """Each output one turn late, so that the device works on the next batch while the host sums up this one."""
    last = None
    for out in outputs:
        if last is not None:
            yield last
        last = out
    if last is not None:
        yield last


def _shards(sharding: NamedSharding | None) -> int:
    """Into how many parts the first axis is cut, over the devices of this process."""
    if sharding is None:
        return 1
    axes = sharding.spec[0] if len(sharding.spec) else None
    names = (axes,) if isinstance(axes, str) else axes or ()
    parts = int(np.prod([sharding.mesh.shape[name] for name in names]))
    if parts % jax.process_count():
        raise ValueError(
            f"{jax.process_count()} processes cannot each hold their own images with the first axis cut into {parts}; "
            f"shard it over all devices, PartitionSpec({sharding.mesh.axis_names})"
        )
    return parts // jax.process_count()


def _pieces(batches: Iterable[Any], size: int | None, multiple: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(images, valid) of always the same shape, whatever the sizes of the batches; size rounded up to a multiple."""
    shape = None
    for batch in batches:
        images = np.asarray(batch["image"] if isinstance(batch, Mapping) else batch)
        if images.ndim != 4 or not len(images):
            raise ValueError(f"a batch must be images [b, h, w, c] with b > 0, got shape {images.shape}")
        if images.dtype == np.float64:
            images = images.astype(np.float32)
        shape = shape or (images.shape[1:], images.dtype)
        if (images.shape[1:], images.dtype) != shape:
            raise ValueError(f"a batch of {images.shape[1:]} {images.dtype} after batches of {shape[0]} {shape[1]}")
        size = -(-(size or len(images)) // multiple) * multiple
        for start in range(0, len(images), size):
            part = images[start : start + size]
            missing = size - len(part)
            padding = np.repeat(part[-1:], missing, axis=0)  # a real image: no network divides by its zeros
            yield np.concatenate([part, padding]), np.arange(size) < len(part)


def _place(piece: tuple[np.ndarray, np.ndarray], sharding: NamedSharding | None) -> tuple[Any, Any]:
    """Host arrays on the default device, or as this process's part of global ones."""
    images, valid = piece
    if sharding is None:
        return jnp.asarray(images), jnp.asarray(valid)
    rows = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
    place = jax.make_array_from_process_local_data
    return place(rows, images), place(rows, valid)
