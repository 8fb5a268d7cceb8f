"""Flax checkpoints of the diffusers library: its UNets and autoencoder under Flax names, and files that are none."""

import re
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.serialization import msgpack_serialize
from flax.traverse_util import unflatten_dict
from paths import GOLDEN

from jaxdiff import weights
from jaxdiff.files import DamagedFile
from jaxdiff.weights import files

TOLD = {  # what these tiny networks have unlike any published one
    "sd_unet": {"heads": 2, "groups": 4},
    "sdxl_unet": {"head_width": 4, "groups": 4, "pooled_dim": 12, "sizes": 6, "size_width": 6},
    "sd_vae": {"groups": 4},
}


def public_arrays(kind):
    """Tiny weights under the names of diffusers."""
    stored = np.load(GOLDEN / f"{kind}.npz")
    if kind == "sd_vae":
        return runpy.run_path(str(GOLDEN / "seeded.py"))["weights"](stored["lines"])
    return {name.removeprefix("param/"): stored[name] for name in stored.files if name.startswith("param/")}


def as_flax(arrays):
    """diffusers' own rule from PyTorch to Flax: `a.0` is a_0; kernels have their inputs first; norms have scales."""
    tree = {}
    for name, array in arrays.items():
        *modules, leaf = re.sub(r"(\w+)\.(\d+)", r"\1_\2", name).split(".")
        if leaf == "weight" and array.ndim == 4:
            leaf, array = "kernel", array.transpose(2, 3, 1, 0)
        elif leaf == "weight" and array.ndim == 2:
            leaf, array = "kernel", array.T
        elif leaf == "weight":
            leaf = "scale"
        tree[(*modules, leaf)] = np.ascontiguousarray(array)
    return unflatten_dict(tree)


@pytest.mark.parametrize("kind", TOLD)
def test_flax_checkpoints_hold_what_the_others_hold(kind, tmp_path):
    arrays = public_arrays(kind)
    path = tmp_path / "diffusion_flax_model.msgpack"
    path.write_bytes(msgpack_serialize(as_flax(arrays)))
    read = files.read(path)
    assert set(read) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array, name)
    one, other = (weights.load(source, kind, **TOLD[kind]) for source in (path, arrays))
    assert one[0] == other[0]
    jax.tree.map(np.testing.assert_array_equal, one[1], other[1])


def test_half_precision_and_a_tree_within_params(tmp_path):
    kernel = np.arange(6, dtype=np.float32).reshape(2, 3)
    path = tmp_path / "w.msgpack"
    path.write_bytes(msgpack_serialize({"params": {"net_0": {"kernel": kernel.astype(jnp.bfloat16)}}}))
    (name, array), *rest = files.read(path).items()
    assert (name, array.dtype, rest) == ("net.0.weight", jnp.bfloat16, [])
    np.testing.assert_array_equal(array.astype(np.float32), kernel.T)


def nested(depth):
    return {"a": nested(depth - 1)} if depth else np.zeros(2)


GOOD = msgpack_serialize({"a": {"kernel": np.zeros((20, 20), np.float32)}})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no messages",
        GOOD[:-7],
        GOOD + b"more",
        GOOD.replace(b"float32", b"object_"),
        GOOD.replace(b"\x14\x14", b"\x7f\x7f"),
        msgpack_serialize({"a": "text"}),
        msgpack_serialize({"a": None}),
        msgpack_serialize(nested(60)),
        b"\x81\xa1a" * 5000 + b"\x01",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x80\x04\x95",
        b"\x93\x01\x02\x03",
    ],
)
def test_what_is_no_checkpoint_is_refused(content, tmp_path):
    path = tmp_path / "w.msgpack"
    path.write_bytes(content)
    with pytest.raises(DamagedFile, match=r"w\.msgpack.*download it again"):
        files.read(path)


def test_msgpack_is_not_written(tmp_path):
    with pytest.raises(ValueError, match=r"\.npz or \.safetensors"):
        files.write(tmp_path / "w.msgpack", {"a": np.zeros(2)})
