"""EMD of an ImageNet-128 teacher (Xie et al. 2024): one step, K = 16.

    jaxdiff train --config=imagenet128_emd:teacher --workdir=runs/imagenet128
    jaxdiff train --config=imagenet128_emd --workdir=runs/imagenet128_emd

The paper's teacher is a U-ViT that is not public; `:teacher` trains an ADM UNet of 421.5 M parameters instead, with
EDM's loss and the noise levels of 64x64 shifted for images twice as large. `:diff_instruct` is the one-step baseline,
`:tiny` takes a few steps of a small network on the embedded digits.

A pod. Published for the paper's teacher: FID 6.0 with one evaluation after 200,000 updates of 1,024 on 128 TPU v5p
(10 days). Not run here. `--config=imagenet64_emd` says what is known, from memory and chosen here.
"""

from ml_collections import ConfigDict

from jaxdiff.arguments import argument
from jaxdiff.configs import imagenet64, imagenet64_emd

ARGUMENTS = {
    "teacher": "the teacher instead, an ADM UNet",
    "diff_instruct": "one Langevin step that leaves z alone (Diff-Instruct)",
    "tiny": "a few steps of a small network on the embedded digits",
}


def get_config(arg: str = "") -> ConfigDict:
    arg = argument(arg, ARGUMENTS)
    c = imagenet64.get_config("tiny" if arg == "tiny" else "")
    with c.unlocked():
        if arg != "tiny":
            c.data.options.image_size = 128
            c.data.batch_size = 2048
            c.model.fields.update(resolution=128, width=256, channel_mult=(1, 1, 2, 3, 4), blocks=2)
            c.model.remat = "full"
        c.noise.shift = 2.0
        if arg == "teacher":
            return c
        imagenet64_emd.distil(c, arg, batch_size=1024, steps=200_000)
        c.teacher.kind, c.teacher.path = ("fresh", "") if arg == "tiny" else ("run", "runs/imagenet128")
    return c
