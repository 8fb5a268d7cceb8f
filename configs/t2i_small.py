"""Text to image at 32x32 on rendered shapes with captions, "a red circle left of a blue square"; no files are needed.

    jaxdiff train --config=t2i_small --workdir=runs/t2i
    jaxdiff sample --workdir=runs/t2i --prompts="a red circle left of a blue square|a blue circle left of a red square"
    jaxdiff evaluate --workdir=runs/t2i

Sample grids show their captions; evaluation reads colours, shapes and their places back from the samples. Networks:
`:mmdit` (the default), `:pixart` and `:latent_unet` are conditioned on the caption, `:dit` and `:mdt` on the pair of
objects as a class. `:curriculum` trains on classes at 16x16 for three quarters of the steps and then on captions at
32x32; sample it with --workdir=runs/t2i/stage2. `:emoji` trains on the files that experiments.conditioning.emoji
writes, or on others like them: --config.data.options.images is an .npz file with images, captions and caption_ids,
--config.data.options.caption_text a folder with the captions' embeddings. `:small` has half the width and depth, on
16x16 images for 1,200 steps. `:tiny` takes a few steps of a small network, `:tiny,pixart` of another one.

On one CPU core a step of the default takes about a second, of `:emoji,small` a third of that.
"""

import math
from typing import Any

from ml_collections import ConfigDict

from jaxdiff.arguments import arguments
from jaxdiff.configs import default
from jaxdiff.data.shapes import PAIRS

TOKENS = {"patch": 4, "depth": 4, "width": 128, "heads": 4}
UNET = {"width": 32, "channel_mult": (1, 2, 2), "blocks": 1, "depths": (0, 1, 1), "heads": 4, "groups": 8}
NETWORKS = {
    "mmdit": {**TOKENS, "pooled_dim": 0},
    "pixart": {**TOKENS, "learn_variance": False},
    "latent_unet": UNET,
    "dit": {**TOKENS, "learn_variance": False},
    "mdt": {**TOKENS, "decoder": 2, "learn_variance": False},
}
SMALL: dict[str, dict[str, Any]] = {name: {"patch": 2, "depth": 2, "width": 16, "heads": 2} for name in NETWORKS}
SMALL["mdt"]["depth"] = 4
SMALL["latent_unet"] = {"width": 8, "channel_mult": (1, 2), "depths": (0, 1), "heads": 2, "groups": 4}

ARGUMENTS = {
    "mmdit": "MMDiT, the default",
    "pixart": "PixArt, conditioned on the caption",
    "latent_unet": "the latent UNet, conditioned on the caption",
    "dit": "DiT, conditioned on the pair of shapes as a class",
    "mdt": "MDT, conditioned on the pair of shapes as a class",
    "curriculum": "classes at 16x16 first, then captions at 32x32",
    "emoji": "the files that experiments.conditioning.emoji makes",
    "small": "half the width and depth on 16x16 images, 1,200 steps",
    "tiny": "a few steps of a small network",
}


def get_config(arg: str = "") -> ConfigDict:
    parts = arguments(arg, ARGUMENTS)
    c = default.get_config()
    c.data.source = "shapes"
    # with both wordings equally frequent no single word indicates a side, and networks take long to combine them
    wordings = ("left", "left", "left", "right")
    c.data.options = ConfigDict({"count": 10_000, "size": 32, "wordings": wordings, "caption_text": (12, 64)})
    c.data.batch_size = 64
    c.model.name = next((part for part in parts if part in NETWORKS), "mmdit")
    c.model.fields = ConfigDict(NETWORKS[c.model.name])
    c.denoiser.kind = "flow"
    c.noise.sigma_sampler, c.noise.std, c.diffusion.weight = "logit_normal", 1.0, "flow"
    c.diffusion.cond_dropout = 0.1
    c.optim.name, c.optim.learning_rate, c.optim.clip = "adamw", 1e-3, 1.0
    c.optim.options = ConfigDict({"b1": 0.9, "b2": 0.95, "weight_decay": 0.0})
    c.optim.warmup_images = 64 * 200
    c.ema.options = ConfigDict({"images": 64 * 200.0, "ramp": 0.05})
    c.train.steps, c.train.sample_every, c.train.save_every = 6000, 1000, 1000
    c.sample.solver, c.sample.timestamps, c.sample.guidance = "dpmpp2m", 16, 2.0
    c.sample.batch_size, c.sample.count = 64, 16
    c.eval.net, c.eval.samples = "", 512
    if "emoji" in parts:
        c.data.source = "arrays"
        c.data.options = ConfigDict({"images": "emoji32.npz", "caption_text": "emoji_text"})
    if "small" in parts:
        c.data.options.update({"size": 16} if c.data.source == "shapes" else {})
        if "patch" in c.model.fields:
            c.model.fields.update(width=64, depth=2 + c.model.fields.get("decoder", 0))
        c.train.steps, c.train.sample_every = 1200, 0
    if "tiny" in parts:
        c.model.fields.update(SMALL[c.model.name])
        c.data.options.update({"count": 40, "size": 8} if c.data.source == "shapes" else {})
        c.data.batch_size, c.train.steps, c.train.log_every, c.train.save_every = 8, 4, 2, 2
        c.sample.timestamps, c.sample.count, c.eval.samples = 3, 4, 8
    if "curriculum" in parts:
        c.curriculum = _curriculum(c)
    # larger shapes remain visible through more noise: train at the levels where they are decided
    size = c.data.options.get("size", 8)  # emoji have finer detail
    c.noise.mean = math.log(size / (8 if "curriculum" in parts else 4))
    c.lock()
    return c


def _curriculum(c: ConfigDict) -> ConfigDict:
    """Classes at half the size first; then captions, with noise and positions adapted to the larger size."""
    half = c.data.options.size // 2
    small = {"data": {"options": {"image_size": half, "crop": "global"}}, "train": {"steps": 3 * c.train.steps // 4}}
    large = {"noise": {"shift": 2.0}, "train": {"steps": c.train.steps // 4}}
    if c.model.name in ("mmdit", "pixart"):
        small["model"] = {"fields": {"num_classes": len(PAIRS)}}
    if c.model.name in ("mmdit", "pixart", "dit"):  # an MDT's own table is resampled
        large["model"] = {"fields": {"grid": half // c.model.fields.patch}}
    return ConfigDict({"stage1": small, "stage2": large})
