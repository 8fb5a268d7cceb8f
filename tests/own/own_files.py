"""Teachers as users write them: one network, in plain JAX, NNX, Linen, and as NumPy on the host.

F(x, t, label) = tanh([x, t] A + E[label]) B,      D(x, sigma) = EDM(F)
"""

from pathlib import Path

import numpy as np

WIDTH, CLASSES = 6, 8


def weights(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"A": (3, WIDTH), "E": (CLASSES + 1, WIDTH), "B": (WIDTH, 2)}
    return {name: (0.5 * rng.normal(size=shape)).astype(np.float32) for name, shape in shapes.items()}


HEAD = """
import jax, jax.numpy as jnp, numpy as np
from pathlib import Path
import jaxdiff
from jaxdiff import conventions, models

W = dict(np.load(Path("{folder}") / "weights.npz"))
EDM = conventions.EDM(0.7)
"""
PLAIN = """
def init(key):
    return {{name: 0.1 * jax.random.normal(key, value.shape) for name, value in W.items()}}

def apply(params, x, noise_label, cond=None):
    label = (cond or {{}}).get("label", jnp.full(len(x), 8))
    time = jnp.broadcast_to(noise_label, x.shape[:1])[:, None]
    return jnp.tanh(jnp.concatenate([x, time], 1) @ params["A"] + params["E"][label]) @ params["B"]

network = models.Plain(init, apply)

def load(config):
    return jaxdiff.Teacher(W, (2,), 8, network, EDM)
"""
NNX = """
from flax import nnx

class Net(nnx.Module):
    def __init__(self, key):
        self.A, self.E, self.B = (nnx.Param(0.1 * jax.random.normal(key, W[name].shape)) for name in "AEB")

    def __call__(self, x, noise_label, cond=None):
        label = (cond or {{}}).get("label", jnp.full(len(x), 8))
        time = jnp.broadcast_to(noise_label, x.shape[:1])[:, None]
        return jnp.tanh(jnp.concatenate([x, time], 1) @ self.A[...] + self.E[...][label]) @ self.B[...]

network = models.from_nnx(Net)

def load(config):
    return jaxdiff.Teacher(W, (2,), 8, network, EDM)
"""
LINEN = """
from flax import linen as nn

class Net(nn.Module):
    width: int = 5

    @nn.compact
    def __call__(self, x, noise_label, cond=None):
        label = (cond or {{}}).get("label", jnp.full(len(x), 8))
        time = jnp.broadcast_to(noise_label, x.shape[:1])[:, None]
        small = nn.initializers.normal(0.1)
        A, E, B = (self.param(n, small, s) for n, s in (("A", (3, self.width)), ("E", (9, self.width)), ("B", (self.width, 2))))
        return jnp.tanh(jnp.concatenate([x, time], 1) @ A + E[label]) @ B

def load(config):
    return jaxdiff.Teacher(W, (2,), 8, Net(width=6), EDM)
"""
HOST = """
def denoise(x, sigma, cond):
    s, label = sigma[:, None], cond["label"] if cond else np.full(len(x), 8)
    scale = np.sqrt(s**2 + 0.7**2)
    h = np.concatenate([x / scale, np.log(s) / 4], 1)
    out = np.tanh(h @ W["A"] + W["E"][label]) @ W["B"]
    return 0.49 / scale**2 * x + 0.7 * s / scale * out

def load(config):
    return jaxdiff.Teacher({{}}, (2,), 8, denoiser=jaxdiff.on_host(denoise), differentiable=False)
"""
KINDS = {"plain": PLAIN, "nnx": NNX, "linen": LINEN, "host": HOST}


def write(folder: Path, kind: str) -> str:
    """FILE.py:load of a teacher of that kind."""
    np.savez(folder / "weights.npz", **weights())
    file = folder / f"my_{kind}.py"
    file.write_text((HEAD + KINDS[kind]).format(folder=folder))
    return f"{file}:load"
