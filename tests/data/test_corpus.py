import importlib.util
import json
import math
import os

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from hetjax.data.corpus import StandardLibrary, Synthetic, TextFiles
from hetjax.data.hashing import example_keys, hash64
from hetjax.errors import InputError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b.txt").write_text("bé")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "sub" / "c.txt").write_text("c")
    (tmp_path / ".git" / "d.txt").write_text("hidden")
    return tmp_path


def test_a_folder_is_read_in_order_without_hidden_files(folder):
    assert TextFiles((str(folder),)).tokens().tobytes() == "abéc".encode()


def test_linked_folders_are_read_too_and_circles_end(folder, tmp_path_factory):
    books = tmp_path_factory.mktemp("books")
    (books / "e.txt").write_text("e")
    (folder / "sub" / "books").symlink_to(books)
    (folder / "sub" / "up").symlink_to(folder)
    assert TextFiles((str(folder),)).tokens().tobytes() == "abéec".encode()


def test_a_file_named_twice_is_read_once(folder):
    paths = (str(folder / "b.txt"), str(folder), str(folder / "sub" / ".." / "b.txt"))
    assert TextFiles(paths).tokens().tobytes() == "béac".encode()


def test_text_that_is_not_utf8_names_file_and_byte(folder):
    (folder / "b.txt").write_bytes(b"abc\xff")
    with pytest.raises(InputError, match=r"b\.txt is not UTF-8 text: byte 3 \(0xff\)"):
        TextFiles((str(folder),)).tokens()


@pytest.mark.parametrize("path", ["", "missing.txt"])
def test_a_path_that_is_not_there(path):
    with pytest.raises(InputError, match=f"paths names '{path}'"):
        TextFiles((path,))


def test_no_paths_and_an_empty_folder(tmp_path):
    with pytest.raises(InputError, match="paths is empty"):
        TextFiles(())
    with pytest.raises(InputError, match="holds no files"):
        TextFiles((str(tmp_path),))


def test_a_tokenizer_gives_the_tokens(folder):
    words = {"[UNK]": 0, "a": 1, "c": 2}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = str(folder.parent / "tokenizer.json")
    tokenizer.save(path)
    corpus = TextFiles((str(folder),), path)
    assert corpus.vocabulary == 3
    assert corpus.tokens().tolist() == [1, 0, 2]


def test_a_tokenizer_without_its_extra(folder, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r'pip install -e "\.\[tokenizers\]"'):
        TextFiles((str(folder),), "tokenizer.json")


def test_a_tokenizer_that_cannot_be_used(folder):
    with pytest.raises(InputError, match="no such file"):
        TextFiles((str(folder),), "missing.json")
    with pytest.raises(InputError, match=r"not a tokenizer\.json"):
        TextFiles((str(folder),), str(folder / "a.txt")).tokens()


def test_the_standard_library_is_real_text():
    tokens = StandardLibrary().tokens()
    assert len(tokens) > 2_000_000
    assert b"import" in tokens[:10_000].tobytes()


def test_a_synthetic_stream_can_be_learned():
    corpus = Synthetic(vocabulary=20, size=20_000, seed=5)
    tokens = corpus.tokens()
    assert tokens.min() >= 0
    assert tokens.max() < 20
    pairs = np.zeros((20, 20))
    np.add.at(pairs, (tokens[:-1], tokens[1:]), 1.0)
    shares = pairs / pairs.sum(axis=1, keepdims=True)
    entropy = -np.sum(pairs * np.log(np.maximum(shares, 1e-9))) / pairs.sum()
    assert entropy < 0.7
    assert entropy > 0.5
    assert entropy < 0.33 + 0.1 * math.log(20)
    np.testing.assert_array_equal(tokens, Synthetic(20, 20_000, seed=5).tokens())
    assert (tokens != Synthetic(20, 20_000, seed=6).tokens()).any()


def test_a_bad_synthetic_stream_is_refused():
    with pytest.raises(InputError, match="vocabulary is 1"):
        Synthetic(vocabulary=1, size=10)
    with pytest.raises(InputError, match="size is 0"):
        Synthetic(vocabulary=2, size=0)


def test_hashes_are_uniform_and_apart():
    numbers = hash64(3, 0, np.arange(10_000))
    assert len(set(numbers.tolist())) == 10_000
    assert abs(numbers.astype(float).mean() / 2**64 - 0.5) < 0.01
    assert not set(numbers.tolist()) & set(hash64(3, 1, np.arange(10_000)).tolist())
    assert len({tuple(key) for key in example_keys(0, np.arange(1000)).tolist()}) == 1000


def write_tokenizer(path, ids, **more):
    model = models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    content = json.loads(tokenizer.to_str())
    content["model"]["vocab"] = ids  # The package would go through all ids below the largest.
    path.write_text(json.dumps(content | more))
    return str(path)


def test_a_vocabulary_reaches_to_the_largest_id(folder):
    path = write_tokenizer(folder.parent / "holes.json", {"[UNK]": 0, "a": 7})
    corpus = TextFiles((str(folder / "a.txt"),), path)
    assert (corpus.vocabulary, corpus.tokens().tolist()) == (8, [7])


@pytest.mark.parametrize("largest", [2**24, 2**31 - 1, 2**31])
def test_ids_that_are_too_large_are_refused(folder, largest):
    path = write_tokenizer(folder.parent / f"{largest}.json", {"[UNK]": 0, "a": largest})
    with pytest.raises(InputError, match=rf"has the id {largest} for the token 'a'"):
        _ = TextFiles((str(folder / "a.txt"),), path).vocabulary


def test_a_tokenizer_neither_cuts_nor_fills_up(folder):
    cut = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    path = write_tokenizer(folder.parent / "cut.json", {"[UNK]": 0, "a": 1}, truncation=cut)
    (folder / "long.txt").write_text("a a a a a")
    assert TextFiles((str(folder / "long.txt"),), path).tokens().tolist() == [1] * 5


def test_a_file_under_another_name_is_read_once(folder):
    os.link(folder / "a.txt", folder / "z.txt")
    assert TextFiles((str(folder),)).tokens().tobytes() == "abéc".encode()


def test_a_pipe_is_not_waited_for(folder):
    os.mkfifo(folder / "pipe")
    with pytest.raises(InputError, match="pipe cannot be read: it is a pipe, not a file"):
        TextFiles((str(folder / "pipe"),)).tokens()
