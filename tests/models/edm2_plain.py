"""EDM2's denoiser written out in NumPy on arrays under their public names, NCHW and float64."""

import re

import numpy as np


def normalize(x, axes):
    return x / (1e-4 + np.sqrt(np.square(x).mean(axes, keepdims=True)))


def weight(w):
    return normalize(w, tuple(range(1, w.ndim))) / np.sqrt(np.prod(w.shape[1:]))


def conv(x, w, gain=1.0):
    w = weight(w) * gain
    if w.ndim == 2:
        return x @ w.T
    pad = w.shape[-1] // 2
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[-2:], axis=(2, 3))
    return np.einsum("bchwij,ocij->bohw", windows, w, optimize=True)


def silu(x):
    return x / (1 + np.exp(-x)) / 0.596


def blend(a, b, t):
    return (a + t * (b - a)) / np.hypot(1 - t, t)


def concat(a, b, t):
    n, m = a.shape[1], b.shape[1]
    scale = np.sqrt((n + m) / ((1 - t) ** 2 + t**2))
    return np.concatenate([a * scale * (1 - t) / np.sqrt(n), b * scale * t / np.sqrt(m)], 1)


def down(x):
    return x.reshape(*x.shape[:2], x.shape[2] // 2, 2, -1, 2).mean((3, 5))


def up(x):
    return x.repeat(2, 2).repeat(2, 3)


def attention(x, p, heads, balance):
    b, _, h, w = x.shape
    y = conv(x, p["attn_qkv.weight"]).reshape(b, heads, -1, 3, h * w)
    q, k, v = np.moveaxis(normalize(y, (2,)), 3, 0)
    a = np.exp(np.einsum("nhcq,nhck->nhqk", q, k) / np.sqrt(q.shape[2]))
    y = np.einsum("nhqk,nhck->nhcq", a / a.sum(-1, keepdims=True), v).reshape(x.shape)
    return blend(x, conv(y, p["attn_proj.weight"]), balance)


def block(x, e, p, name, head_width, balances):
    encoder = name.startswith("enc")
    x = down(x) if name.endswith("_down") else up(x) if name.endswith("_up") else x
    skip = p.get("conv_skip.weight")
    if encoder:
        x = normalize(x if skip is None else conv(x, skip), (1,))
    y = conv(silu(x), p["conv_res0.weight"])
    y = silu(y * (1 + conv(e, p["emb_linear.weight"], p["emb_gain"]))[:, :, None, None])
    y = conv(y, p["conv_res1.weight"])
    if not encoder and skip is not None:
        x = conv(x, skip)
    x = blend(x, y, balances["res"])
    if "attn_qkv.weight" in p:
        x = attention(x, p, x.shape[1] // head_width, balances["attn"])
    return x.clip(-256, 256)


def fourier(x, p):
    return np.sqrt(2) * np.cos(x[:, None] * p["freqs"] + p["phases"])


def draw(
    seed, resolution, widths, blocks, attended, classes=0, channels=3, noise=0, embed=0, uncertainty=8, head_width=64
):
    """Random arrays of a network by public name."""
    rng = np.random.default_rng(seed)
    noise, embed = noise or widths[0], embed or max(widths)
    shapes = {"unet.out_gain": (), "unet.emb_fourier.freqs": (noise,), "unet.emb_fourier.phases": (noise,)}
    shapes["unet.emb_noise.weight"] = (embed, noise)
    if classes:
        shapes["unet.emb_label.weight"] = (embed, classes)

    def add(name, inputs, outputs, attend=False):
        own = {"emb_gain": (), "conv_res0.weight": (outputs, outputs if name.startswith("enc") else inputs, 3, 3)}
        own |= {"emb_linear.weight": (outputs, embed), "conv_res1.weight": (outputs, outputs, 3, 3)}
        if inputs != outputs:
            own["conv_skip.weight"] = (outputs, inputs, 1, 1)
        if attend and outputs >= head_width:
            own |= {"attn_qkv.weight": (3 * outputs, outputs, 1, 1), "attn_proj.weight": (outputs, outputs, 1, 1)}
        shapes.update({f"unet.{name}.{key}": shape for key, shape in own.items()})
        return outputs

    sides = [resolution >> level for level in range(len(widths))]
    c, skips = channels + 1, []
    for side, width in zip(sides, widths, strict=True):
        if side == resolution:
            shapes[f"unet.enc.{side}x{side}_conv.weight"] = (width, c, 3, 3)
            c = width
        else:
            c = add(f"enc.{side}x{side}_down", c, c)
        skips.append(c)
        for i in range(blocks):
            c = add(f"enc.{side}x{side}_block{i}", c, width, side in attended)
            skips.append(c)
    for side, width in zip(sides[::-1], widths[::-1], strict=True):
        if side == sides[-1]:
            c = add(f"dec.{side}x{side}_in0", c, c, True)
            c = add(f"dec.{side}x{side}_in1", c, c)
        else:
            c = add(f"dec.{side}x{side}_up", c, c)
        for i in range(blocks + 1):
            c = add(f"dec.{side}x{side}_block{i}", c + skips.pop(), width, side in attended)
    shapes["unet.out_conv.weight"] = (channels, c, 3, 3)
    shapes |= {"logvar_fourier.freqs": (uncertainty,), "logvar_fourier.phases": (uncertainty,)}
    shapes["logvar_linear.weight"] = (1, uncertainty)
    return {name: np.asarray(rng.normal(size=shape), np.float32) for name, shape in shapes.items()}


def order(arrays):
    """Blocks in the order of execution: down the sides, and up again."""

    def key(name):
        decoder, side, kind = name.startswith("dec"), int(re.search(r"(\d+)x", name)[1]), name.split("_")[1]
        first = kind in ("conv", "down", "up", "in0", "in1")
        return decoder, side if decoder else -side, not first, kind

    matches = (re.match(r"unet\.((enc|dec)\.[^.]+)\.", name) for name in arrays)
    return sorted({match[1] for match in matches if match}, key=key)


def denoise(arrays, x, sigma, label, head_width=64, label_balance=0.5, concat_balance=0.5, res=0.3, attn=0.3):
    """(D(x, sigma, label), u(sigma))."""
    arrays = {name: np.asarray(a, np.float64) for name, a in arrays.items()}

    def part(prefix):
        start = f"{prefix}."
        return {name.removeprefix(start): a for name, a in arrays.items() if name.startswith(start)}

    s = sigma[:, None, None, None]
    noise = np.log(sigma) / 4
    e = conv(fourier(noise, part("unet.emb_fourier")), arrays["unet.emb_noise.weight"])
    if "unet.emb_label.weight" in arrays:
        classes = arrays["unet.emb_label.weight"].shape[1]
        onehot = np.eye(classes + 1)[label][:, :classes] * np.sqrt(classes)
        e = blend(e, conv(onehot, arrays["unet.emb_label.weight"]), label_balance)
    e = silu(e)
    h = x / np.sqrt(0.25 + s**2)
    h = np.concatenate([h, np.ones_like(h[:, :1])], 1)
    skips = []
    for name in order(arrays):
        p = part(f"unet.{name}")
        if re.search(r"\d_conv$", name):
            h = conv(h, p["weight"])
        else:
            if re.search(r"^dec.*block", name):
                h = concat(h, skips.pop(), concat_balance)
            h = block(h, e, p, name, head_width, {"res": res, "attn": attn})
        if name.startswith("enc"):
            skips.append(h)
    out = conv(h, arrays["unet.out_conv.weight"], arrays["unet.out_gain"])
    u = conv(fourier(noise, part("logvar_fourier")), arrays["logvar_linear.weight"])[:, 0]
    return 0.25 / (0.25 + s**2) * x + 0.5 * s / np.sqrt(0.25 + s**2) * out, u
