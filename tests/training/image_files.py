"""Folders of tiny images."""

import numpy as np
from PIL import Image


def write_images(folder, sizes):
    """PNG files 0000.png, 0001.png, ... of the given heights and widths."""
    folder.mkdir(parents=True)
    for i, (height, width) in enumerate(sizes):
        Image.fromarray(np.full((height, width, 3), 10 * i, np.uint8)).save(folder / f"{i:04d}.png")
