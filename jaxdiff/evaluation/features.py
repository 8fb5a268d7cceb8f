"""Feature networks by name, and their features over a stream of images: compiled once, optionally sharded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jaxdiff import compilation, outside, weights
from jaxdiff.errors import check_images, choose, pick
from jaxdiff.evaluation import classifier, compact
from jaxdiff.evaluation.frechet import Moments, update
from jaxdiff.evaluation.report import digest
from jaxdiff.models import dinov2, efficientnet, inception
from jaxdiff.models.resize import RESIZERS, as_float
from jaxdiff.remote import local
from jaxdiff.trees import AnyArray, Params

FilePath: TypeAlias = str | os.PathLike
Outputs: TypeAlias = dict[str, Array]
Batch: TypeAlias = AnyArray | Mapping[str, AnyArray]


class FeatureNet(NamedTuple):
    """A feature network: what a protocol records of it, and the function itself."""

    name: str
    sha256: str  # of the file its weights come from
    resize: str  # kind and side, "bilinear-299"; "none" for images as they are
    apply: Callable[[AnyArray], Outputs]  # images uint8 or [-1, 1], NHWC -> features [b, d] and, if the network has
    #                                       them, spatial features [b, e], probabilities [b, classes] and features of
    #                                       patches [b, rows, columns, d]


class Extracted(NamedTuple):
    """Moments of the features, and on request the features and probabilities of every image, in order."""

    moments: Moments
    features: np.ndarray | None = None
    probabilities: np.ndarray | None = None
    spatial: Moments | None = None  # of spatial features, where the network has them


# ------------------------------------------------------------------------------------------ the networks


def feature_net(
    name: str, path: FilePath | None = None, *, resize: str = "bilinear", side: int | None = None
) -> FeatureNet:
    """A feature network by name: `inception`, `efficientnet_lite0` and `dinov2` with their weights at `path`; `compact`
    and `digits`, which come with the package; FILE.py:NAME is a function of your own.

    `resize` and `side` say how images are resized for networks from files; changing them changes the metrics.
    The result's `apply` is a pytree that carries the weights, so it can be an argument of a jitted function.
    """
    if outside.is_reference(name):
        return _own(name)
    return pick(NETS, name, "feature network")(name, path, resize, side)


def _own(reference: str) -> FeatureNet:
    """A function of your own: uint8 images [b h w c] to features [b d], or to a dict of `features` and more."""
    function, file = outside.attribute(reference), outside.file_of(reference)

    def apply(images: AnyArray) -> Outputs:
        out = function(images)
        return dict(out) if isinstance(out, Mapping) else {"features": out}

    sha256 = outside.digest(file) if file else ""
    return FeatureNet(outside.split(reference)[1], sha256, "none", jax.tree_util.Partial(apply))


def _digits(name: str, path: FilePath | None, resize: str, side: int | None) -> FeatureNet:
    model, params, sha256 = classifier.load(path)
    return FeatureNet(name, sha256, "none", jax.tree_util.Partial(_apply(model.apply, as_float), params))


def _compact(name: str, path: FilePath | None, resize: str, side: int | None) -> FeatureNet:
    model, params, sha256 = compact.load(path)
    apply = jax.tree_util.Partial(_apply(model.apply, compact.preprocess), params)
    return FeatureNet(name, sha256, f"{compact.RESIZE}-{compact.SIDE}", apply)


def _inception(name: str, path: FilePath | None, resize: str, side: int | None) -> FeatureNet:
    """Probabilities omit the bias of the logits, as in every published Inception score.

    Files for FID alone have no logits, or a single one in their place: then there are no probabilities.
    """

    def unbiased(variables: Params, x: Array) -> Outputs:
        out: Any = model.apply(variables, x)
        logits = out.pop("logits", None)
        return {**out, "logits": logits - variables["params"]["fc"]["bias"]} if model.num_classes > 1 else out

    model, params, sha256 = _load(name, path)
    assert isinstance(model, inception.Inception)
    return _photo_net(name, sha256, unbiased, params, inception, resize, side)


def _efficientnet(name: str, path: FilePath | None, resize: str, side: int | None) -> FeatureNet:
    model, params, sha256 = _load(name, path)
    return _photo_net(name, sha256, model.apply, params, efficientnet, resize, side)


def _dinov2(name: str, path: FilePath | None, resize: str, side: int | None) -> FeatureNet:
    model, params, sha256 = _load(name, path)
    return _photo_net(name, sha256, model.apply, params, dinov2, resize, side)


NETS: dict[str, Callable[[str, FilePath | None, str, int | None], FeatureNet]] = {
    "inception": _inception,
    "efficientnet_lite0": _efficientnet,
    "dinov2": _dinov2,
    "digits": _digits,
    "compact": _compact,
}
SOURCES = {
    "inception": "get pt_inception-2015-12-05 of pytorch-fid (mseitzer/pytorch-fid, release fid_weights) and, where "
    "torch is installed, write its state dict: safetensors.torch.save_file(torch.load(name), 'inception.safetensors')",
    "efficientnet_lite0": "get the ImageNet weights of EfficientNet-Lite0, fold each batch norm into the convolution "
    "before it, save HWIO kernels and biases as stem, block0..15.{expand,depthwise,project}, head, fc in one .npz",
    "dinov2": "get dinov2_vitl14_pretrain (facebookresearch/dinov2; ViT-S and B work too) and, where torch is "
    "installed, write its state dict: safetensors.torch.save_file(torch.load(name), 'dinov2.safetensors')",
}


def _load(name: str, path: FilePath | None) -> tuple[nn.Module, Params, str]:
    """Model, parameters and hash; the error says what to download and how to convert it."""
    path = None if path is None else local(path)
    if path is None or not path.is_file():
        where = "no path was given" if path is None else f"there is no file {path.resolve()}"
        raise FileNotFoundError(f"feature network {name!r} needs its weights, but {where}: {SOURCES[name]}")
    return *weights.load(path, name), digest(path)


def _photo_net(
    name: str,
    sha256: str,
    call: Callable[..., Any],
    params: Params,
    module: ModuleType,
    kind: str,
    side: int | None,
) -> FeatureNet:
    """A network for photographs behind its own preprocessing."""
    side = module.SIDE if side is None else side
    choose(kind, RESIZERS, "resize kind")
    apply = _apply(call, lambda images: module.preprocess(images, kind, side))
    return FeatureNet(name, sha256, f"{kind}-{side}", jax.tree_util.Partial(apply, params))


def _apply(call: Callable[..., Any], prepare: Callable[[AnyArray], Array]) -> Callable[[Params, AnyArray], Outputs]:
    def apply(params: Params, images: AnyArray) -> Outputs:
        out = call({"params": params}, prepare(images))
        found = {name: out[name] for name in ("features", "spatial", "patches") if name in out}
        return {**found, "probabilities": jax.nn.softmax(out["logits"])} if "logits" in out else found

    return apply


# ------------------------------------------------------------------------------------------ running them


def extract(
    net: FeatureNet,
    batches: Iterable[Batch],
    sharding: NamedSharding | None = None,
    *,
    batch_size: int | None = None,
    keep: bool = False,
) -> Extracted:
    """Features of every image in `batches` (arrays, or dicts with `image`), as moments; `keep` returns them all too.

    Each call of the network sees `batch_size` images (default: those of the first batch), the last ones padded, so it
    is compiled once. With `sharding` images are sharded along the first axis and weights replicated. Each of several
    processes feeds its own images, the same number of batches, and all get the moments of all.
    """
    moments: Moments | None = None
    spatial: Moments | None = None
    kept: list[dict[str, np.ndarray]] = []
    for rows in outputs(net, batches, sharding, batch_size=batch_size):
        moments = update(moments, rows["features"])
        if "spatial" in rows:
            spatial = update(spatial, rows.pop("spatial"))
        kept += [rows] * keep
    if moments is None:
        raise ValueError("no images to extract features from: the iterable of batches is empty (or already consumed)")
    if not keep:
        return Extracted(moments, spatial=spatial)
    every = {name: np.concatenate([rows[name] for rows in kept]) for name in kept[0]}
    return Extracted(moments, every["features"], every.get("probabilities"), spatial)


def outputs(
    net: FeatureNet, batches: Iterable[Batch], sharding: NamedSharding | None = None, *, batch_size: int | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """All outputs of a network, `batch_size` images at a time; see `extract`."""
    mesh = None if sharding is None else sharding.mesh
    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    apply = net.apply if everywhere is None else jax.device_put(net.apply, everywhere)
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    run = jax.jit(_run, out_shardings=everywhere, compiler_options=compilation.options(platform))
    pieces = _pieces(batches, batch_size, _shards(sharding))
    for out in _delayed(run(apply, *_place(piece, sharding)) for piece in pieces):
        rows = {name: np.asarray(value) for name, value in out.items() if value is not None}
        valid = rows.pop("valid")
        yield {name: value[valid] for name, value in rows.items()}


def _run(apply: Callable[[Array], Outputs], images: Array, valid: Array) -> Outputs:
    out = {name: value for name, value in apply(images).items() if name != "patches"}  # which no metric uses
    return {**out, "valid": valid}


def _delayed(outputs: Iterator[Outputs]) -> Iterator[Outputs]:
    """Each output one iteration late, so that the device computes the next batch while the host processes this one."""
    last = None
    for out in outputs:
        if last is not None:
            yield last
        last = out
    if last is not None:
        yield last


def _shards(sharding: NamedSharding | None) -> int:
    """The number of shards of the first axis on this process."""
    if sharding is None:
        return 1
    axes = sharding.spec[0] if len(sharding.spec) else None
    names = (axes,) if isinstance(axes, str) else axes or ()
    parts = int(np.prod([sharding.mesh.shape[name] for name in names]))
    if parts % jax.process_count():
        raise ValueError(
            f"{jax.process_count()} processes cannot each hold their own images with {parts} shards of the first axis; "
            f"shard it over all devices, PartitionSpec({sharding.mesh.axis_names})"
        )
    return parts // jax.process_count()


def _pieces(batches: Iterable[Batch], size: int | None, multiple: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(images, valid) of one shape, whatever the batch sizes; `size` is rounded up to a multiple."""
    shape = None
    for batch in batches:
        images = images_of(batch)
        shape = shape or (images.shape[1:], images.dtype)
        if (images.shape[1:], images.dtype) != shape:
            raise ValueError(f"a batch of {images.shape[1:]} {images.dtype} after batches of {shape[0]} {shape[1]}")
        size = -(-(size or len(images)) // multiple) * multiple
        for start in range(0, len(images), size):
            part = images[start : start + size]
            missing = size - len(part)
            padding = np.repeat(part[-1:], missing, axis=0)  # an image rather than zeros, which could give NaN
            yield np.concatenate([part, padding]), np.arange(size) < len(part)


def images_of(batch: Batch) -> np.ndarray:
    """The images [b h w c] of a batch, an array or a dict with `image`."""
    images = np.asarray(batch["image"] if isinstance(batch, Mapping) else batch)
    if images.ndim != 4 or not len(images):
        raise ValueError(f"a batch must be images [b, h, w, c] with b > 0, got shape {images.shape}")
    if images.dtype != np.uint8:
        check_images("images for a feature network", images)
        if images.min() >= 0 and images.max() > 2:  # noisy images exceed [-1, 1] on both sides
            raise ValueError(
                f"float images for a feature network lie in [-1, 1], got values from {images.min():.4g} to "
                f"{images.max():.4g}; give uint8, or x / 127.5 - 1 for 0..255"
            )
    return images.astype(np.float32) if images.dtype == np.float64 else images


def _place(piece: tuple[np.ndarray, np.ndarray], sharding: NamedSharding | None) -> tuple[Array, Array]:
    """Host arrays on the default device, or as this process's shards of global arrays."""
    images, valid = piece
    if sharding is None:
        return jnp.asarray(images), jnp.asarray(valid)
    rows = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
    place = jax.make_array_from_process_local_data
    return place(rows, images), place(rows, valid)
