"""Texts to tokens by a tokenizer.json, and to hashed vectors."""

import sys

import numpy as np
import pytest

from jaxdiff import data
from jaxdiff.data import prompts

LENGTH, WIDTH = 8, 256


# ------------------------------------------------------------------------------------ tokenizer.json


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of words with a start and an end, as CLIP's, and no word on padding."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    words = ["<|startoftext|>", "<|endoftext|>", "?", "a", "red", "circle", "!"]
    rules = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    rules.normalizer, rules.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    ends = [(word, i) for i, word in enumerate(words[:2])]
    rules.post_processor = processors.TemplateProcessing(single=f"{words[0]} $A {words[1]}", special_tokens=ends)
    path = tmp_path_factory.mktemp("tokenizer")
    rules.save(str(path / "tokenizer.json"))
    return path


def test_texts_are_padded_cut_and_masked(folder):
    ids, mask = data.tokenizer(folder, length=6)(["a Red circle", "a a a a red red red", ""])
    assert ids.dtype == np.int32 and mask.dtype == bool
    np.testing.assert_array_equal(ids, [[0, 3, 4, 5, 1, 1], [0, 3, 3, 3, 3, 1], [0, 1, 1, 1, 1, 1]])
    np.testing.assert_array_equal(mask, np.arange(6) < np.array([[5], [6], [2]]))


def test_the_token_to_pad_with_may_be_chosen(folder):
    ids, mask = data.tokenizer(folder / "tokenizer.json", length=5, pad="!")(["red"])
    np.testing.assert_array_equal(ids, [[0, 4, 1, 6, 6]])
    np.testing.assert_array_equal(mask, [[1, 1, 1, 0, 0]])


def test_no_texts_give_no_rows(folder):
    assert [array.shape for array in data.tokenizer(folder, length=5)([])] == [(0, 5), (0, 5)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda folder: data.tokenizer(folder / "none.json", 5), r"none.json.*tried"),
        (lambda folder: data.tokenizer(folder.parent, 5), r"tokenizer.json.*tried"),
        (lambda folder: data.tokenizer(folder, 2), r"length=2.*3"),
        (lambda folder: data.tokenizer(folder, 5, pad="<|endoftex|>"), r"'<\|endoftex\|>'.*did you mean '<\|endoftext\|>'"),
        (lambda folder: data.tokenizer(folder, 5)("red"), r"\['red'\]"),
        (lambda folder: data.tokenizer(__file__, 5), r"test_text.py.*tokenizer.json"),
    ],
)  # fmt: skip
def test_bad_tokenizers_say_what_to_do(call, message, folder):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        call(folder)


def test_what_to_pad_with_must_be_known(folder, tmp_path):
    text = (folder / "tokenizer.json").read_text().replace("endoftext", "end")
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"<pad>, .*pad="):
        data.tokenizer(tmp_path, 5)


def test_a_missing_library_is_named(monkeypatch, folder):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "jaxdiff\[text\]"'):
        data.tokenizer(folder, 5)


# ------------------------------------------------------------------------------------ hashed words


def hashed(*texts, **options):
    return data.hashed_text(texts, LENGTH, WIDTH, **options)


def test_shapes_masks_and_scale():
    out = hashed("a red circle", "", "Two blue squares, left.")
    assert {name: (array.shape, array.dtype) for name, array in out.items()} == {
        "text": ((3, LENGTH, WIDTH), np.float32),
        "text_mask": ((3, LENGTH), bool),
        "pooled": ((3, WIDTH), np.float32),
    }
    np.testing.assert_array_equal(out["text_mask"].sum(1), [4, 1, 7])  # the start, words and marks
    assert not out["text"][~out["text_mask"]].any()
    for values in (out["text"][out["text_mask"]], out["pooled"]):
        assert abs(values.mean()) < 0.1 and abs(np.square(values).mean() - 1) < 0.2


def test_a_word_is_the_same_vector_everywhere_and_another_word_another():
    """Differences between rows at two places are those of the places, whatever the words."""
    out = hashed("red circle", "circle red", "RED Circle")
    shift = out["text"][0, 1] - out["text"][1, 2]  # red at places 1 and 2
    np.testing.assert_allclose(out["text"][1, 1] - out["text"][0, 2], shift, atol=1e-5)
    assert np.abs(shift).max() > 0.1
    assert np.abs(out["text"][0, 1] - out["text"][1, 1]).max() > 0.5
    np.testing.assert_array_equal(out["text"][0], out["text"][2])


def test_pooled_vectors_know_words_and_their_order():
    texts = ["circle left of square", "square left of circle", "circle right of square", "", "circle left of square"]
    pooled = hashed(*texts)["pooled"]
    np.testing.assert_array_equal(pooled[0], pooled[4])
    distance = np.square(pooled[:4, None] - pooled[None, :4]).mean(-1)
    assert distance[~np.eye(4, dtype=bool)].min() > 0.1


def test_two_thousand_words_are_told_apart():
    words = [f"w{i}" for i in range(2_000)]
    vectors = data.hashed_text(words, 2, 8)["text"][:, 1]
    assert len(np.unique(vectors.round(4), axis=0)) == len(words)


def test_vectors_are_the_same_on_every_machine_and_follow_the_seed():
    out = data.hashed_text(["red"], 2, 2)
    np.testing.assert_allclose(out["text"][0], [[0.7478735, -0.4500291], [-0.1478118, -0.8980507]], rtol=1e-6)
    np.testing.assert_allclose(out["pooled"][0], [-0.51873624, -1.012148], rtol=1e-6)
    assert np.abs(data.hashed_text(["red"], 2, 2, seed=1)["text"] - out["text"]).max() > 0.1


def test_tables_serve_as_prompts(tmp_path):
    for name, table in hashed("red circle", "blue square", "").items():
        np.save(tmp_path / f"{name}.npy", table)
    dataset = data.build(prompts.prompts(str(tmp_path), (4, 4, 3)))
    assert dataset.size == 2 and dataset.take(0, 2)["text"].shape == (2, LENGTH, WIDTH)
    np.testing.assert_array_equal(dataset.signals["pooled"].null, hashed("")["pooled"][0])


@pytest.mark.parametrize(
    ("texts", "length", "width", "message"),
    [
        (["one", "one two three"], 3, 8, r"'one two three'.*4 tokens.*length=3"),
        ("red", 3, 8, r"\['red'\]"),
        (["red"], 3, 0, r"length=3, width=0"),
        ([], 3, 8, r"0 prompts"),
    ],
)
def test_bad_texts_say_what_to_do(texts, length, width, message):
    with pytest.raises(ValueError, match=message):
        data.hashed_text(texts, length, width)
