"""Protocols of published numbers by name: the network, how images are resized for it, and what is computed with it.

edm           TF 1 resizing; 50,000 samples against all training images (Karras et al. 2022, and most work since)
adm           the same network and resizing, with sFID, precision and recall for k = 3 (Dhariwal & Nichol 2021)
pytorch_fid   bilinear resizing as pytorch-fid does it
clean_fid     antialiased bicubic resizing (Parmar et al. 2022)
fd_dinov2     class tokens of DINOv2's ViT-L/14 at 224x224, antialiased bicubic (Stein et al. 2023); not an FID
"""

from __future__ import annotations

import dataclasses

from ml_collections import ConfigDict

from jaxdiff.errors import pick


@dataclasses.dataclass(frozen=True)
class Preset:
    """Fields of `eval` that a preset sets."""

    resize: str
    net: str = "inception"
    sfid: bool = False
    neighbours: int = 5


PRESETS = {
    "edm": Preset("tensorflow"),
    "adm": Preset("tensorflow", sfid=True, neighbours=3),
    "pytorch_fid": Preset("bilinear"),
    "clean_fid": Preset("clean"),
    "fd_dinov2": Preset("clean", net="dinov2"),
}
UNSET = ("", "digits", "compact")  # eval.net of a config that does not choose a network


def resolved(options: ConfigDict) -> ConfigDict:
    """The section `eval` of a config with its preset applied."""
    if not options.preset:
        return options
    preset = pick(PRESETS, options.preset, "evaluation preset")
    if options.net not in (*UNSET, preset.net):
        raise ValueError(
            f"eval.preset={options.preset!r} measures with {preset.net!r}, but eval.net={options.net!r}; "
            "unset one of them"
        )
    found = options.copy_and_resolve_references()
    with found.unlocked():
        found.update(dataclasses.asdict(preset))
    return found
