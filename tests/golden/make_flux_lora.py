"""Makes flux_lora.npz: what the tiny FLUX of flux.npz gives with low-rank updates of all layers, read by diffusers.

    python tests/golden/make_flux_lora.py

Run where torch, diffusers and peft are installed; written with diffusers 0.42.1. Factors are drawn by name (seeded.py), small so that no activation
saturates; stored are the names that the library took and the output.
"""

from pathlib import Path

import numpy as np
import seeded
import torch
from diffusers import FluxTransformer2DModel
from make_flux import FLUX, packed, unpacked

HERE = Path(__file__).parent
RANK = 3


def main() -> None:
    golden = dict(np.load(HERE / "flux.npz"))
    model = FluxTransformer2DModel(**FLUX, guidance_embeds=True).eval()
    base = {name: torch.tensor(value) for name, value in seeded.weights(golden["weights/dev"]).items()}
    model.load_state_dict({**model.state_dict(), **base})
    layers = [name.removesuffix(".weight") for name, value in base.items() if value.ndim == 2]
    factors = {}
    for layer in layers:
        out, inner = base[f"{layer}.weight"].shape
        factors[f"transformer.{layer}.lora_A.weight"] = torch.tensor(seeded.draw(f"{layer}.A", (RANK, inner)))
        factors[f"transformer.{layer}.lora_B.weight"] = torch.tensor(seeded.draw(f"{layer}.B", (out, RANK)))
    model.load_lora_adapter(dict(factors), prefix="transformer")
    taken = {name for name, _ in model.named_parameters() if "lora_" in name}
    assert len(taken) == len(factors), (len(taken), len(factors))
    x, t = torch.tensor(golden["in/x"]), torch.tensor(golden["in/t"]) / 1000
    ids = torch.zeros(4, 6, 3)
    ids[..., 1], ids[..., 2] = torch.arange(4)[:, None], torch.arange(6)
    with torch.no_grad():
        out = model(
            packed(x), encoder_hidden_states=torch.tensor(golden["in/text"]),
            pooled_projections=torch.tensor(golden["in/pooled"]), timestep=t, img_ids=ids.reshape(-1, 3),
            txt_ids=torch.zeros(5, 3), guidance=torch.tensor(golden["in/guidance"]), return_dict=False,
        )[0]  # fmt: skip
    change = (unpacked(out, x.shape) - torch.tensor(golden["out/dev"])).abs().max()
    print("changed by at most", float(change))
    np.savez_compressed(HERE / "flux_lora.npz", names=np.array(sorted(factors)), out=unpacked(out, x.shape).numpy())


if __name__ == "__main__":
    main()
