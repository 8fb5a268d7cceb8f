"""Weights too large to store, drawn the same way where the golden arrays are made and where they are tested."""

import zlib

import numpy as np


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """One float32 array that depends on its public name and shape only; the scales keep activations near one.

    Generator.random alone is used: its bits do not change between NumPy versions.
    """
    unit = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode()))).random(shape, np.float32)
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "running_var" or name.endswith("bn.weight"):
        return 0.5 + unit
    centred = (2 * unit - 1) * np.float32(3**0.5)  # mean 0, variance 1
    if leaf == "kernel":  # input channels last but one
        return centred * np.float32((2 / np.prod(shape[:-1])) ** 0.5)
    if leaf == "weight":  # output channels first
        return centred * np.float32((2 / np.prod(shape[1:])) ** 0.5)
    return centred * np.float32(0.1)


def listing(shapes: dict[str, tuple[int, ...]], factors: dict[str, float]) -> np.ndarray:
    """One line an array: name, shape, factor, which is that of a layer in its name; small ones let epsilons tell."""
    factor = {name: next((factors[part] for part in name.split(".") if part in factors), 1) for name in shapes}
    return np.array([f"{name} {','.join(map(str, shape))} {factor[name]}" for name, shape in shapes.items()])


def weights(lines: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of a `listing`."""
    arrays = {}
    for name, shape, factor in (line.split(" ") for line in lines):
        drawn = draw(name, tuple(int(size) for size in shape.split(",") if size)) * np.float32(factor)
        arrays[name] = np.asarray(drawn)
    return arrays


def images(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Smooth 8-bit images, so that resizing them is not resizing noise."""
    b, h, w, c = shape
    phase = np.random.Generator(np.random.PCG64(seed)).random((3, b, 1, 1, c)) * 6
    rows, columns = np.arange(h)[:, None, None] / h, np.arange(w)[:, None] / w
    waves = np.sin(phase[0] + phase[1] * 3 * rows) + np.sin(phase[1] + phase[2] * 4 * columns)
    return (127.5 + 60 * waves).astype(np.uint8)
