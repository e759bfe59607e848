"""Tokenizers: the same ids as the libraries and as transformers, and text that can grow."""

import json
import random
import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import TEXTS, write_byte_level, write_config, write_sentencepiece, write_words

from moebatch.data.tokenizer import load_tokenizer
from moebatch.errors import ModelError

MIXTRAL = Path(__file__).parents[2] / "shared/data/mixtral-tokenizer"
needs_mixtral = pytest.mark.skipif(
    not (MIXTRAL / "tokenizer.json").exists(), reason="needs ../shared/data/mixtral-tokenizer"
)
STRANGE = [
    "", " ", "  ", "\n", "\t", "\r\n", "a", "x y", "é", "e\u0301", "日本", "😀", "\u200b", "\xa0",
    "▁", "<s>", "</s>", "<unk>", "<tool call>", "<0x0A>", "[INST]", "[/INST]", "ﬁ", "\ufffd", "0",
]  # fmt: skip
texts = st.lists(st.sampled_from(STRANGE) | st.text(max_size=5), max_size=8).map("".join)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return write_byte_level(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    return write_sentencepiece(tmp_path_factory.mktemp("sentencepiece"))


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece", "mixtral"])
def folder(request):
    if request.param == "mixtral":
        if not (MIXTRAL / "tokenizer.json").exists():
            pytest.skip("needs ../shared/data/mixtral-tokenizer")
        return MIXTRAL
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


@settings(deadline=None)
@given(data=st.data())
def test_pushed_texts_joined_are_the_decoded_text(tokenizer, data):
    """For any ids, invalid UTF-8 included, and never a half character on the way."""
    some = st.integers(0, 300) | st.integers(0, tokenizer.vocab_size - 1)
    ids = data.draw(st.lists(some, max_size=20))
    for skip in (True, False):
        stream = tokenizer.stream(skip_special_tokens=skip)
        pushed = [stream.push(token_id) for token_id in ids]
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(pushed) + stream.finish() == whole
        assert whole.startswith("".join(pushed))


@settings(deadline=None)
@given(text=texts)
def test_text_survives_encoding_and_streaming(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = tokenizer.stream(skip_special_tokens=False)
    pushed = [stream.push(token_id) for token_id in ids]
    if not any(special in text for special in ("<s>", "</s>", "<unk>", "▁")):
        assert "".join(pushed) == text
        assert stream.finish() == ""
    for part in pushed:
        part.encode()  # a half character would have no encoding


def test_a_character_comes_out_when_its_last_byte_is_in(tokenizer):
    ids = tokenizer.encode("😀\n", add_special_tokens=False)
    stream = tokenizer.stream()
    pushed = [text for text in map(stream.push, ids) if text]
    assert "".join(pushed) == "😀\n"
    assert "\ufffd" not in "".join(pushed)


def test_a_newline_is_not_held_back(tokenizer):
    """A stop at the newline must see it at once, although it is a byte token in Llama's kind."""
    ids = tokenizer.encode("cat\n", add_special_tokens=False)
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) == "cat\n"


@pytest.mark.parametrize("bytes_", [b"A\xffB", b"\xe6\x97", b"\xf0\x9f\x98A", b"\xc3\xa9\x80"])
def test_a_broken_character_costs_only_itself(bytes_):
    from moebatch.data.token_text import ByteTable, decode_all

    table = ByteTable(
        bytes_of=lambda token_id: bytes([token_id]),
        special_ids=frozenset(),
        strips_first_space=False,
    )
    assert decode_all(table, bytes_, skip_special_tokens=True) == bytes_.decode("utf-8", "replace")


@settings(deadline=None)
@given(text=texts, special=st.booleans(), skip=st.booleans())
@pytest.mark.parametrize("name", ["byte_level", "mixtral"])
def test_ids_and_text_are_those_of_the_library(request, name, text, special, skip):
    if name == "mixtral" and not (MIXTRAL / "tokenizer.json").exists():
        pytest.skip("needs ../shared/data/mixtral-tokenizer")
    folder = MIXTRAL if name == "mixtral" else request.getfixturevalue(name)
    ours, library = _pair(folder)
    ids = library.encode(text, add_special_tokens=special).ids
    assert ours.encode(text, add_special_tokens=special) == ids
    decoded = library.decode(ids, skip_special_tokens=skip)
    if "\ufffd" not in decoded:
        assert ours.decode(ids, skip_special_tokens=skip) == decoded


_PAIRS = {}


def _pair(folder):
    if folder not in _PAIRS:
        library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        _PAIRS[folder] = (load_tokenizer(folder), library)
    return _PAIRS[folder]


@needs_mixtral
def test_both_formats_of_mixtral_give_the_same_ids(tmp_path):
    shutil.copy(MIXTRAL / "tokenizer.model", tmp_path)
    from_json, from_model = load_tokenizer(MIXTRAL), load_tokenizer(tmp_path)
    draw = random.Random(0)
    samples = ["".join(draw.choices(STRANGE, k=draw.randrange(10))) for _ in range(1500)]
    for text in [*samples, *_prompts()]:
        for special in (True, False):
            ids = from_json.encode(text, add_special_tokens=special)
            assert from_model.encode(text, add_special_tokens=special) == ids
        assert from_model.decode(ids) == from_json.decode(ids)
    for name in ("bos_token_id", "eos_token_id", "special_ids", "vocab_size"):
        assert getattr(from_model, name) == getattr(from_json, name)
    assert [from_model.token_bytes(i) for i in range(32000)] == [
        from_json.token_bytes(i) for i in range(32000)
    ]


def _prompts():
    path = MIXTRAL.parent / "mt_bench.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [turn for row in rows for turn in row["turns"]]


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"add_bos_token": False},
        {"add_bos_token": True},
        {"add_bos_token": False, "add_eos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"template": False},
        {"template": False, "add_bos_token": True},
    ],
)
def test_special_tokens_are_added_as_transformers_does(tmp_path, flags):
    from transformers import AutoTokenizer

    folder = write_byte_level(tmp_path, **flags)
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    for text in [*TEXTS, "<s>hi</s>", "a<tool call>b"]:
        for special in (True, False):
            expected = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == expected
            assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.special_ids == set(theirs.all_special_ids)


def test_tokens_that_only_the_configuration_names_are_known(tmp_path):
    """A chat model often adds its turn markers in tokenizer_config.json alone."""
    from transformers import AutoTokenizer

    size = load_tokenizer(write_byte_level(tmp_path)).vocab_size
    entry = {"content": "<|turn|>", "special": True, "normalized": False}
    entry |= {"lstrip": False, "rstrip": True, "single_word": False}
    far = entry | {"content": "<|far|>"}
    write_config(tmp_path, added_tokens_decoder={str(size): entry})
    ours = load_tokenizer(tmp_path)
    expected = AutoTokenizer.from_pretrained(tmp_path).encode("a<|turn|>  b")
    assert ours.encode("a<|turn|>  b", add_special_tokens=True) == expected
    assert size in ours.special_ids
    write_config(tmp_path, added_tokens_decoder={str(size + 7): far})
    assert load_tokenizer(tmp_path).vocab_size == size


def test_sentencepiece_with_added_tokens(sentencepiece, tmp_path):
    shutil.copy(sentencepiece / "tokenizer.model", tmp_path)
    size = load_tokenizer(sentencepiece).vocab_size
    marker = {"content": "<|end|>", "special": True, "rstrip": True}
    write_config(tmp_path, added_tokens_decoder={str(size): marker}, add_bos_token=False)
    ours = load_tokenizer(tmp_path)
    cat = ours.encode("cat", add_special_tokens=False)
    assert ours.encode("cat<|end|> \ncat", add_special_tokens=True) == [*cat, size, *cat]
    assert ours.encode("<s>cat</s>", add_special_tokens=False) == [1, *cat, 2]
    assert ours.decode([1, *cat, size]) == "cat"
    assert ours.decode([1, *cat, size], skip_special_tokens=False) == "<s> cat<|end|>"
    assert load_tokenizer(sentencepiece).encode("cat", add_special_tokens=True) == [1, *cat]


def test_an_unusual_decoder_is_measured(tmp_path):
    ours = load_tokenizer(write_words(tmp_path))
    ids = ours.encode("the cats sat down", add_special_tokens=True)
    assert ids == [1, 2, 3, 4, 5]
    assert ours.decode(ids) == "the cats sat down"
    stream = ours.stream()
    assert [stream.push(token_id) for token_id in ids] == ["the", " cat", "s", " sat", " down"]


def test_padding_and_truncation_in_the_file_do_nothing(tmp_path):
    path = write_byte_level(tmp_path) / "tokenizer.json"
    library = tokenizers.Tokenizer.from_file(str(path))
    plain = library.encode(TEXTS[0]).ids
    library.enable_truncation(3)
    library.enable_padding(length=50)
    library.save(str(path))
    assert load_tokenizer(tmp_path).encode(TEXTS[0], add_special_tokens=True) == plain


def test_token_texts_and_bytes(tokenizer):
    ids = tokenizer.encode("the cat", add_special_tokens=False)
    assert "".join(map(tokenizer.token_text, ids)).strip() == "the cat"
    assert b"".join(map(tokenizer.token_bytes, ids)).strip() == b"the cat"
    assert tokenizer.token_text(tokenizer.bos_token_id) == "<s>"
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""


def test_the_fingerprint_follows_the_files(byte_level, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(byte_level, copy)
    before = load_tokenizer(copy).fingerprint
    assert before == load_tokenizer(byte_level).fingerprint
    write_config(copy, add_bos_token=False)
    assert load_tokenizer(copy).fingerprint != before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (None, b""),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff"),
        ("tokenizer.model", b"nothing"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[]"),
    ],
)
def test_a_broken_or_missing_tokenizer_is_one_line_and_exit_7(tmp_path, name, content):
    if name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.exit_code == 7
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
