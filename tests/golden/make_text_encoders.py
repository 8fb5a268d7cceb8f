"""Makes clip_text.npz, clip_projected.npz, clip.npz and t5.npz: tiny encoders of transformers and their outputs.

    python tests/golden/make_text_encoders.py

Run where torch and transformers are installed; written with torch 2.13.0 and transformers 5.22.2. The tests need only
the arrays. Weights are drawn by their names (seeded.py) where they are needed; the files hold the names.
"""

import torch
from make_autoencoders import describe, fill, save
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    T5Config,
    T5EncoderModel,
)

EOS = 19
TEXT = {
    "vocab_size": 20, "max_position_embeddings": 7, "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 3, "num_attention_heads": 2, "bos_token_id": 18, "eos_token_id": EOS, "pad_token_id": EOS,
}  # fmt: skip
VISION = {
    "image_size": 6, "patch_size": 3, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 2,
}  # fmt: skip
T5 = {
    "vocab_size": 20, "d_model": 12, "d_kv": 4, "num_heads": 2, "d_ff": 10, "num_layers": 2,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 128, "feed_forward_proj": "gated-gelu",
}  # fmt: skip
L = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
BIGG = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20}
VIT_L = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "patch_size": 14,
}  # fmt: skip
XXL = {"d_model": 4096, "d_kv": 64, "num_heads": 64, "d_ff": 10240, "num_layers": 24, "feed_forward_proj": "gated-gelu"}
FAINT = dict.fromkeys(("embeddings", "shared"), 2**-6)

IDS = torch.tensor([[18, 3, 5, 4, EOS, EOS, EOS], [18, 7, EOS, 0, 0, 0, 0], [18, 1, 2, 3, 4, 5, EOS]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]])


@torch.no_grad()
def make_text(name: str, model: torch.nn.Module) -> None:
    """Outputs over all tokens, and of one run that hides padding."""
    lines = fill(model, FAINT)
    out, masked = (model(IDS, attention_mask=mask, output_hidden_states=True) for mask in (None, MASK))
    pooled = "text_embeds" if "text_embeds" in out else "pooler_output"
    save(
        name, lines=lines, in__ids=IDS.numpy(), in__mask=MASK.numpy(), out__last=out.last_hidden_state,
        out__penultimate=out.hidden_states[-2], out__pooled=out[pooled], out__masked=masked.last_hidden_state,
    )  # fmt: skip


@torch.no_grad()
def make_clip() -> None:
    config = {"text_config": CLIPTextConfig(**TEXT), "vision_config": CLIPVisionConfig(**VISION), "projection_dim": 5}
    model = CLIPModel(CLIPConfig(**config))
    lines = fill(model, FAINT)
    x = torch.randn(3, 3, 6, 6)
    out = model(IDS, x)
    scale = model.logit_scale.exp()
    save("clip", lines=lines, in__x=x, in__ids=IDS.numpy(), out__image=out.image_embeds, out__text=out.text_embeds,
         out__cosine=out.logits_per_image / scale)  # fmt: skip


@torch.no_grad()
def make_t5() -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    model = T5EncoderModel(T5Config(**T5))
    # logits of size 1, as T5 starts with, and a smaller product of gates and values: otherwise rounding alone moves
    # the outputs of torch in float32 by 2e-5 from those in float64; so they differ by 2e-6
    lines = fill(model, {**FAINT, "q": 0.125, "wi_0": 0.5, "wi_1": 0.5})
    ids = torch.randint(0, 20, (2, 40))
    mask = (torch.arange(40) < torch.tensor([[40], [23]])).long()
    out, masked = (model(ids, attention_mask=m).last_hidden_state for m in (torch.ones_like(mask), mask))
    offsets = torch.arange(-300, 301)
    buckets = T5Attention._relative_position_bucket(offsets, num_buckets=32, max_distance=128)
    save("t5", lines=lines, in__ids=ids.numpy(), in__mask=mask.numpy(), in__offsets=offsets.numpy(),
         out__buckets=buckets.numpy(), out__last=out, out__masked=masked)  # fmt: skip


if __name__ == "__main__":
    text = {"vocab_size": 49408, "max_position_embeddings": 77}
    describe("CLIP-L text", CLIPTextModel, {"config": CLIPTextConfig(**text, **L)})
    describe("bigG", CLIPTextModelWithProjection, {"config": CLIPTextConfig(**text, **BIGG, projection_dim=1280)})
    describe("CLIP-L image", CLIPVisionModelWithProjection, {"config": CLIPVisionConfig(**VIT_L, projection_dim=768)})
    describe("T5 XXL", T5EncoderModel, {"config": T5Config(**XXL)})
    torch.manual_seed(0)
    make_text("clip_text", CLIPTextModel(CLIPTextConfig(**TEXT)))
    make_text(
        "clip_projected", CLIPTextModelWithProjection(CLIPTextConfig(**TEXT, hidden_act="gelu", projection_dim=6))
    )
    make_clip()
    make_t5()
