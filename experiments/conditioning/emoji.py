"""The files that configs/t2i_small.py:emoji reads, from a set of 32x32 emoji with captions and their embeddings.

    python -m experiments.conditioning.emoji --data=FOLDER [--out=.]

FOLDER holds emoji32.npz, images with the number of their captions, and emoji_text_minilm_tokens.npz, the last hidden
states of a sentence encoder for each caption. Writes emoji32.npz (images, captions, caption_ids; the
captions of the test split left out) and emoji_text/ (text.npy, text_mask.npy).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np


def table(hidden: np.ndarray, offsets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings [rows + 1, l, d] of captions and their mask; the last row, for no caption, is one token of zeros."""
    lengths = np.append(np.diff(offsets)[rows], 1)
    text = np.zeros((len(lengths), lengths.max(), hidden.shape[1]), np.float16)
    for i, row in enumerate(rows):
        text[i, : lengths[i]] = hidden[offsets[row] : offsets[row + 1]]
    return text, np.arange(lengths.max()) < lengths[:, None]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", required=True)
    p.add_argument("--out", default=".")
    args = p.parse_args()
    files = [Path(args.data) / f"{name}.npz" for name in ("emoji32", "emoji_text_minilm_tokens")]
    for file in files:
        if not file.is_file():
            p.error(f"there is no {file.name} in {Path(args.data).resolve()}")
    emoji, encoded = (np.load(file, allow_pickle=False) for file in files)
    kept = np.flatnonzero(~emoji["is_test"].astype(bool))  # captions
    number = np.full(len(emoji["captions"]), -1)
    number[kept] = np.arange(len(kept))
    ids = number[emoji["caption_id"]]
    out = Path(args.out)
    (out / "emoji_text").mkdir(parents=True, exist_ok=True)
    images = emoji["images"][ids >= 0]
    np.savez(out / "emoji32.npz", images=images, captions=emoji["captions"][kept], caption_ids=ids[ids >= 0])
    text, mask = table(encoded["hidden"], encoded["token_offsets"], kept)
    np.save(out / "emoji_text" / "text.npy", text)
    np.save(out / "emoji_text" / "text_mask.npy", mask)
    print(f"wrote {len(images)} images with {len(kept)} captions of up to {text.shape[1]} tokens to {out}")


if __name__ == "__main__":
    main()
