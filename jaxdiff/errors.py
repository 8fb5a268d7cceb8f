"""Error messages: what was given, what is allowed, what to change."""

from __future__ import annotations

import difflib
import dis
import importlib
import re
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from jaxdiff.trees import AnyArray

T = TypeVar("T")

# Names used by other libraries and papers, in lower case without punctuation, and ours.
ALIASES: dict[str, tuple[str, ...]] = {
    # config keys
    "lr": ("learning_rate",),
    "wd": ("weight_decay",),
    "beta1": ("b1",),
    "beta2": ("b2",),
    "bs": ("batch_size",),
    "batch": ("batch_size",),
    "maxsteps": ("steps",),
    "numsteps": ("steps",),
    "trainsteps": ("steps",),
    "iterations": ("steps",),
    "numinferencesteps": ("timestamps", "steps"),
    "cfg": ("guidance",),
    "cfgscale": ("guidance",),
    "guidancescale": ("guidance",),
    "sampler": ("solver",),
    "scheduler": ("solver", "schedule"),
    "gradclip": ("clip",),
    "gradientaccumulation": ("accumulate",),
    "nclasses": ("num_classes",),
    # solvers and their grids
    "ddim": ("euler",),
    "ddpm": ("ancestral",),
    "eulera": ("ancestral",),
    "eulerancestral": ("ancestral",),
    "edm": ("heun",),
    "dpm2m": ("dpmpp2m",),
    "dpm3m": ("dpmpp3m",),
    "dpmsolver": ("dpmpp2m",),
    "dpm2msde": ("sde_dpmpp2m",),
    "dpmpp2msde": ("sde_dpmpp2m",),
    "plms": ("ipndm",),
    "pndm": ("ipndm",),
    "karras": ("polynomial",),
    "exponential": ("logsnr",),
    # conventions and precision
    "epsilon": ("eps",),
    "vprediction": ("v",),
    "rf": ("flow",),
    "rectifiedflow": ("flow",),
    "flowmatching": ("flow",),
    "scaledlinear": ("sqrt_linear",),
    "fp32": ("float32",),
    "bf16": ("bfloat16",),
    "fp16": ("float16", "bfloat16"),
    # networks and their weights
    "adm": ("edm", "unet"),
    "ddpmpp": ("edm", "unet"),
    "ncsnpp": ("edm", "unet"),
    "sd": ("sd_unet", "latent_unet"),
    "sd14": ("sd_unet", "latent_unet"),
    "sd15": ("sd_unet", "latent_unet"),
    "sd2": ("sd_unet", "latent_unet"),
    "sd21": ("sd_unet", "latent_unet"),
    "stablediffusion": ("sd_unet", "latent_unet"),
    "sdxl": ("sdxl_unet", "latent_unet"),
    "sd3": ("sd3", "mmdit"),
    "sd35": ("sd3", "mmdit"),
    "flux1": ("flux",),
    "fluxdev": ("flux",),
    "fluxschnell": ("flux",),
    "vae": ("sd_vae",),
    "fid": ("inception",),
    # data
    "imagefolder": ("folder",),
    "tensorflowdatasets": ("tfds",),
}


def pick(table: Mapping[str, T], name: str, what: str) -> T:
    """`table[name]`, or a ValueError that lists the names and the nearest one."""
    return table[choose(name, table, what)]


def choose(name: str, options: Iterable[str], what: str) -> str:
    """`name` if it is one of the options, else a ValueError that lists them and the nearest one."""
    names = list(options)
    if name in names:
        return name
    raise ValueError(f"unknown {what} {name!r}{nearest(name, names)}; choose one of {', '.join(names)}")


def nearest(name: str, names: Iterable[str]) -> str:
    """' (did you mean ...?)' if some name is an alias (ALIASES) or has a similar spelling, else ''."""
    close = closest(name, names)
    return f" (did you mean {close[0]!r}?)" if close else ""


def optional_import(module: str, purpose: str, extra: str) -> ModuleType:
    """A module that only an extra of jaxdiff installs, or an error that names the extra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = module.partition(".")[0]
        raise ModuleNotFoundError(
            f'{purpose} needs {missing}, which is not installed; pip install "jaxdiff[{extra}]"'
        ) from error


def closest(name: str, names: Iterable[str], n: int = 1) -> list[str]:
    """At most n of `names`, best first: what `name` is an alias of, then similar spellings."""
    allowed = list(names)
    plain = re.sub(r"[^a-z0-9]", "", str(name).lower())
    meant = [target for target in ALIASES.get(plain, ()) if target in allowed]
    alike = difflib.get_close_matches(str(name), allowed, n=n)
    return list(dict.fromkeys(meant + alike))[:n]


def raised_on_purpose(error: BaseException, packages: Iterable[str] = ("jaxdiff",)) -> bool:
    """Whether a `raise` statement in one of these packages raised the error, so that its message is for the user.

    Errors raised by NumPy, JAX or the interpreter, and those that indicate bugs (KeyError, AttributeError), are not.
    """
    if not isinstance(error, (ValueError, OSError, RuntimeError, ImportError, TypeError)) or not error.__traceback__:
        return False
    innermost = error.__traceback__
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    module = innermost.tb_frame.f_globals.get("__name__", "")
    instruction = innermost.tb_frame.f_code.co_code[innermost.tb_lasti]
    return module.split(".")[0] in packages and dis.opname[instruction] == "RAISE_VARARGS"


def is_whole(value: object) -> bool:
    """Whether a value is an integer; True and False are not."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def concrete(value: ArrayLike) -> np.ndarray | None:
    """The value as a NumPy array, or None if it is traced."""
    import jax  # not at the top: command-line help and completion do not wait for it

    return None if isinstance(value, jax.core.Tracer) else np.asarray(value)


def check_ratio(ratio: float) -> None:
    """A ratio of image sizes must be positive and finite."""
    if not 0 < ratio < np.inf:
        raise ValueError(f"a resolution ratio must be positive, got {ratio}")


def check_number(name: str, value: ArrayLike, low: float = -np.inf, high: float = np.inf, hint: str = "") -> None:
    """A number, or each of an array, must be real, finite and in [low, high]; traced ones are not checked."""
    seen = concrete(value)
    if seen is None:
        return
    if seen.dtype.kind not in "iuf" or not (np.isfinite(seen) & (seen >= low) & (seen <= high)).all():
        kind = "a finite number" if (low, high) == (-np.inf, np.inf) else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{name} must be {kind}, got {seen}" + (f"; {hint}" if hint else ""))


def check_positive(name: str, value: ArrayLike) -> None:
    """A number, or each of an array, must be positive and finite; traced ones are not checked."""
    seen = concrete(value)
    if seen is not None and not (np.isfinite(seen) & (seen > 0)).all():
        raise ValueError(f"{name} must be positive, got {seen}")


def check_real(name: str, dtype: np.dtype) -> None:
    """Complex numbers would lose their imaginary part in silence."""
    if np.issubdtype(dtype, np.complexfloating):
        raise ValueError(f"{name} must be real, got {dtype}; give its real part, or both as channels")


def check_floats(name: str, dtype: np.dtype) -> None:
    """Images and noise are real floats; integers and complex numbers are not converted in silence."""
    if not np.issubdtype(dtype, np.floating) and "float" not in dtype.name:  # bfloat16 is not NumPy's
        raise ValueError(f"{name} must be floats, got {dtype}; for pixels in 0..255 give x / 127.5 - 1, in [-1, 1]")


def check_images(name: str, images: AnyArray) -> None:
    """Images and noise are real floats, and finite where that can be seen before tracing."""
    check_floats(name, images.dtype)
    seen = concrete(images)
    if seen is not None and not np.isfinite(seen.astype(np.float32)).all():
        raise ValueError(f"{name} has NaN or infinite values; remove them first")


def check_sigma(sigma: ArrayLike) -> None:
    """Noise levels must be positive and finite; traced ones are not checked."""
    seen = concrete(sigma)
    if seen is not None and not (np.isfinite(seen) & (seen > 0)).all():
        bad = seen[~(np.isfinite(seen) & (seen > 0))].flat[0]
        raise ValueError(
            f"sigma must be positive and finite, got {bad}; x is x0 + sigma * eps, so end at a small "
            "sigma such as 0.002 rather than at 0"
        )
