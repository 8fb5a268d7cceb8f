"""EMD of an ImageNet-128 teacher (Xie et al. 2024): one step, K = 16.

    jaxdiff train --config=configs/imagenet128_emd.py:teacher --workdir=runs/imagenet128
    jaxdiff train --config=configs/imagenet128_emd.py --workdir=runs/imagenet128_emd

The paper's teacher is a U-ViT that is not public; `:teacher` trains an ADM UNet of 421.5 M parameters instead, with
EDM's loss and the levels of 64x64 shifted for images twice as large. `:diff_instruct` is the one-step baseline, `:tiny`
tries it on the digits.

A pod. Published for the paper's teacher: FID 6.0 with one evaluation after 200,000 updates of 1,024 on 128 TPU v5p
(10 days). Not run here. What is known, remembered and chosen is as in configs/imagenet64_emd.py.
"""

from ml_collections import ConfigDict

from jaxdiff.configs import imagenet64, imagenet64_emd


def get_config(arg: str = "") -> ConfigDict:
    if arg not in ("", "teacher", "diff_instruct", "tiny"):
        raise ValueError(f"imagenet128_emd takes 'teacher', 'diff_instruct', 'tiny' or none, got {arg!r}")
    c = imagenet64.get_config("tiny" if arg == "tiny" else "")
    with c.unlocked():
        if arg != "tiny":
            c.data.options.image_size = 128
            c.data.batch_size = 2048
            c.model.fields.update(resolution=128, width=256, multipliers=(1, 1, 2, 3, 4), blocks=2)
            c.model.remat = "full"
        c.noise.shift = 2.0
        if arg == "teacher":
            return c
        imagenet64_emd.distil(c, arg, batch_size=1024, steps=200_000)
        c.teacher.kind, c.teacher.path = ("fresh", "") if arg == "tiny" else ("run", "runs/imagenet128")
    return c
