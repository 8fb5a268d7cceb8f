"""Images to training crops: decode, resize, crop, flip, each recorded as control metadata.

Each crop returns a square window and its position, in pixels of the image it was cropped from:

    center   short side resized to `size`, middle window
    global   short side resized to `size`, window at a random place ("random" is an alias)
    local    window at a random place of the unresized image
    mixed    local with probability `local_share`, else global

The window is cropped first, then flipped, so `window[:, ::-1]` of a flipped one is the window at `crop`.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Shaped, UInt8

from jaxdiff.errors import choose, is_whole

MAX_PIXELS = 2**26  # of an image file: 8192 x 8192
RESAMPLE = {"area": "BOX", "bilinear": "BILINEAR", "bicubic": "BICUBIC", "lanczos": "LANCZOS"}


class CorruptImage(ValueError):
    """An example whose bytes cannot be turned into an image; the message names it."""


class Transform(NamedTuple):
    """Applied to every image. `size` None disables cropping, `channels` None keeps the stored ones."""

    size: int | None = None
    crop: str = "center"
    local_share: float = 0.5
    flip: bool = False
    resample: str = "bicubic"
    channels: int | None = None


def check(transform: Transform) -> Transform:
    """The transform itself, or an error about its first invalid field."""
    choose(transform.crop, CROPS, "crop")
    choose(transform.resample, RESAMPLE, "resample filter")
    if transform.size is not None and not (is_whole(transform.size) and transform.size >= 1):
        raise ValueError(f"image_size must be a positive number of pixels, got {transform.size!r}")
    if not isinstance(transform.flip, (bool, np.bool_)):
        raise ValueError(f"flip is True or False, got {transform.flip!r}")
    if not 0 <= transform.local_share <= 1:
        raise ValueError(f"local_share is a probability, got {transform.local_share}")
    if transform.channels not in (None, 1, 3):
        raise ValueError(f"channels must be 1 (grey), 3 (RGB) or None (as stored), got {transform.channels}")
    return transform


def apply(
    transform: Transform, image: Shaped[np.ndarray, "h w c"], rng: np.random.Generator, name: str
) -> tuple[Shaped[np.ndarray, "size1 size2 channels"], dict[str, tuple]]:
    """The window [h w c] in the image's own dtype, and the value of every name in CONTROLS."""
    height, width = image.shape[:2]
    resized, corner = (height, width), (0, 0)
    if transform.size is not None:
        image, resized, corner = CROPS[transform.crop](transform, transform.size, image, rng, name)
    flip = transform.flip and rng.random() < 0.5
    image = to_channels(image[:, ::-1] if flip else image, transform.channels, name)
    record = {
        "original_size": (height, width),
        "crop": corner,
        "flip": (float(flip),),
        "aspect": (width / height,),
        "resized_size": resized,
    }
    return image, record


# ---------------------------------------------------------------------------------------------- crops

Cut = tuple[np.ndarray, tuple[int, int], tuple[int, int]]  # window, size of the cropped image, (top, left)


def _window(image: np.ndarray, size: int, top: int, left: int) -> Cut:
    return image[top : top + size, left : left + size], image.shape[:2], (top, left)


def _center(transform: Transform, size: int, image: np.ndarray, rng: np.random.Generator, name: str) -> Cut:
    image = _shrink(transform, size, image)
    return _window(image, size, (image.shape[0] - size) // 2, (image.shape[1] - size) // 2)


def _global(transform: Transform, size: int, image: np.ndarray, rng: np.random.Generator, name: str) -> Cut:
    return _random_window(_shrink(transform, size, image), size, rng)


def _local(transform: Transform, size: int, image: np.ndarray, rng: np.random.Generator, name: str) -> Cut:
    height, width = image.shape[:2]
    if min(height, width) < size:
        raise ValueError(
            f"{name} is {height} x {width} pixels (height x width), too small for a local crop of {size}; "
            "use crop='global', which resizes, or a smaller image_size"
        )
    return _random_window(image, size, rng)


def _mixed(transform: Transform, size: int, image: np.ndarray, rng: np.random.Generator, name: str) -> Cut:
    crop = _local if rng.random() < transform.local_share else _global
    return crop(transform, size, image, rng, name)


CROPS: dict[str, Callable[[Transform, int, np.ndarray, np.random.Generator, str], Cut]] = {
    "center": _center,
    "global": _global,
    "random": _global,
    "local": _local,
    "mixed": _mixed,
}


def _random_window(image: np.ndarray, size: int, rng: np.random.Generator) -> Cut:
    top, left = (int(rng.integers(side - size + 1)) for side in image.shape[:2])
    return _window(image, size, top, left)


def _shrink(transform: Transform, size: int, image: np.ndarray) -> np.ndarray:
    """The image with its short side resized to `size`; the long one rounded to whole pixels."""
    height, width = image.shape[:2]
    scale = size / min(height, width)
    return resize(image, (max(size, round(height * scale)), max(size, round(width * scale))), transform.resample)


# ---------------------------------------------------------------------------------------------- pixels


def resize(
    image: Shaped[np.ndarray, "h w c"], shape: tuple[int, int], resample: str = "bicubic"
) -> Shaped[np.ndarray, "h2 w2 c"]:
    """The image at `shape` (h, w) by Pillow's antialiased filters; floats stay in [-1, 1]."""
    if image.shape[:2] == shape:
        return image
    from PIL import Image

    method = getattr(Image.Resampling, RESAMPLE[resample])

    def plane(pixels: np.ndarray) -> np.ndarray:
        return np.asarray(Image.fromarray(pixels).resize(shape[::-1], method))

    if image.dtype == np.uint8 and image.shape[-1] == 3:
        return plane(np.ascontiguousarray(image))
    planes = np.stack([plane(np.ascontiguousarray(image[..., c])) for c in range(image.shape[-1])], axis=-1)
    return planes if image.dtype == np.uint8 else np.clip(planes, -1, 1)  # bicubic and lanczos overshoot


def to_channels(image: np.ndarray, channels: int | None, name: str) -> np.ndarray:
    """Grey to RGB by repetition, RGB to grey by the luma weights of ITU-R 601."""
    stored = image.shape[-1]
    if channels in (None, stored):
        return image
    if (stored, channels) == (1, 3):
        return np.repeat(image, 3, axis=-1)
    if (stored, channels) == (3, 1):
        grey = image @ np.asarray([[0.299], [0.587], [0.114]], np.float32)
        return np.rint(grey).astype(np.uint8) if image.dtype == np.uint8 else grey
    raise ValueError(f"{name} has {stored} channels, which cannot become {channels}; leave channels=None")


def decode(data: bytes, name: str, max_pixels: int = MAX_PIXELS) -> UInt8[np.ndarray, "h w c"]:
    """The upright image as uint8 [h w c]: c = 1 for grey files, else 3, transparency composited over white.

    A file whose header states more than `max_pixels` is a CorruptImage, and is not unpacked.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data)) as opened:
            width, height = opened.size
            if width * height > max_pixels:
                raise CorruptImage(
                    f"cannot decode {name}: it has {height} x {width} pixels, more than max_pixels={max_pixels}; "
                    "raise data.options.max_pixels if that is meant"
                )
            return _pixels(ImageOps.exif_transpose(opened), name)
    except CorruptImage:
        raise
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError, struct.error ... for broken files
        raise CorruptImage(f"cannot decode {name} ({len(data)} bytes): {error}") from error


def _pixels(opened: Any, name: str) -> np.ndarray:
    from PIL import Image

    if opened.mode.startswith("I;16"):  # Pillow's own conversion would clip at 255
        return (np.asarray(opened) >> 8).astype(np.uint8)[..., None]
    if opened.mode in ("I", "F"):
        raise CorruptImage(
            f"cannot decode {name}: mode {opened.mode!r} has no defined range; store 8 or 16 bits per pixel"
        )
    if opened.has_transparency_data:
        opened = opened.convert("RGBA")
        opened = Image.alpha_composite(Image.new("RGBA", opened.size, "white"), opened)
    grey = opened.mode in ("1", "L")
    pixels = np.asarray(opened.convert("L" if grey else "RGB"))
    return pixels[..., None] if grey else pixels
