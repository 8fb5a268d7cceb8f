"""SFD of Stable Diffusion 3.5 medium (Zhou et al. 2024; Stability AI 2024): four Euler steps at 1024x1024.

    jaxdiff train --config=sd35_sfd --config.data.options.path=prompts --workdir=runs/sd35_sfd

The teacher, sd35_medium.safetensors, is the transformer of the public release under the diffusers library's names
(docs/weights.md; `--config.teacher.path` names another file). No images are needed: `prompts` is a folder with
text.npy, the 77 tokens of both CLIP encoders side by side and the 256 of T5-XXL, [prompts + 1, 333, 4096], and
pooled.npy, both pooled CLIP embeddings [prompts + 1, 2048], the last row that of the empty prompt. The student learns
the teacher's guidance of 4.5. It is an update of rank 64 of the blocks' kernels, merged into the export. Of the
2469.7 M parameters, 226.5 M are the constant table of positions. `:full` trains all of them, `:blank` plans or tries it
without prompts, `:tiny` takes a few steps of a small network without files.

A pod: docs/results/pods.md has the state per chip. Nobody has published this recipe and it was not run here: rank,
rates, length, batch and noise levels are choices as in flux_sfd. Noise levels are those of a uniform grid in flow time,
times SD3's 3 for 1024x1024.
"""

from ml_collections import ConfigDict

from jaxdiff.arguments import argument
from jaxdiff.configs import flux_sfd

ARGUMENTS = {
    "full": "all parameters are trained",
    "blank": "without prompts",
    "tiny": "a few steps of a small network, without files",
}


def get_config(arg: str = "") -> ConfigDict:
    arg = argument(arg, ARGUMENTS)
    c = flux_sfd.get_config(arg)
    with c.unlocked():
        c.model.name, c.noise.shift, c.sfd.guidance = "mmdit", 3.0, 4.5
        if arg == "tiny":
            fields = {"depth": 3, "dual": 1, "width": 16, "heads": 2, "pooled_dim": 8}
            c.model.fields = ConfigDict({**fields, "scan": True})
            c.lora.targets = "^(blocks|dual)/"
            return c
        c.model.fields = ConfigDict(
            {"depth": 24, "dual": 13, "width": 1536, "heads": 24, "position_table": 384, "scan": True}
        )
        c.teacher.kind, c.teacher.path = "sd3", "sd35_medium.safetensors"
        c.lora.targets = "^(dual|blocks|last_block)/"
        if arg == "blank":
            c.data.options = ConfigDict({"shape": (128, 128, 16), "text": (333, 4096), "pooled": 2048})
    return c
