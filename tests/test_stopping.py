"""When a sequence ends, and what text it leaves. The tokenizer is bytes: token id = byte value."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebatch.data.requests import SamplingParams
from moebatch.runtime.stopping import Finish, StopChecker

EOS, EOT = 256, 257
SPECIAL = {EOS: "</s>", EOT: "<eot>"}


def decode(token_ids: Sequence[int], skip_special_tokens: bool) -> str:
    special = {} if skip_special_tokens else SPECIAL
    pieces = (special.get(i, "").encode() if i in SPECIAL else bytes([i]) for i in token_ids)
    return b"".join(pieces).decode(errors="replace")


class ByteStream:
    """Gives out the characters that are complete; keeps the first bytes of others back."""

    opened = 0

    def __init__(self, skip_special_tokens: bool) -> None:
        type(self).opened += 1
        self._skip = skip_special_tokens
        self._pending = b""

    def push(self, token_id: int) -> str:
        if token_id in SPECIAL:
            return "" if self._skip else SPECIAL[token_id]
        self._pending += bytes([token_id])
        try:
            text = self._pending.decode()
        except UnicodeDecodeError:
            return ""
        self._pending = b""
        return text


class WordStream:
    """Tokens are numbers of given pieces of text."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]


def checker(*, prompt_len=3, max_model_len=1000, eos=(EOS,), **params) -> StopChecker:
    return StopChecker(
        SamplingParams(**{"max_tokens": 100} | params),
        eos_token_ids=eos,
        prompt_len=prompt_len,
        max_model_len=max_model_len,
        open_stream=ByteStream,
        decode=decode,
    )


def feed(check: StopChecker, tokens: Sequence[int]) -> Finish | None:
    """Push until the end; what is left over must not have been needed."""
    for token in tokens:
        if check.push(token):
            break
    return check.finish


STOP = Finish(reason="stop")
LENGTH = Finish(reason="length")


def test_eos_ends_and_leaves_no_text():
    check = checker()
    assert feed(check, [*b"hi", EOS, *b"more"]) == STOP
    assert check.text() == "hi"
    assert list(check.token_ids) == [*b"hi", EOS]


@pytest.mark.parametrize("token", [EOS, EOT])
def test_every_eos_of_the_list_ends(token):
    assert feed(checker(eos=(EOS, EOT)), [*b"hi", token]) == STOP


def test_ignore_eos_goes_on_to_the_limit():
    check = checker(ignore_eos=True, max_tokens=5)
    assert feed(check, [*b"hi", EOS, *b"yo", *b"more"]) == LENGTH
    assert check.text() == "hiyo"


def test_stop_token_names_itself():
    check = checker(stop_token_ids=(ord("."),))
    assert feed(check, b"one. two.") == Finish(reason="stop", stop_reason=ord("."))
    assert check.text() == "one"


def test_eos_that_is_a_stop_token_counts_as_stop_token():
    expected = Finish(reason="stop", stop_reason=EOS)
    assert feed(checker(stop_token_ids=(EOS,)), [EOS]) == expected
    assert feed(checker(stop_token_ids=(EOS,), ignore_eos=True), [EOS]) == expected


def test_eos_text_shows_only_where_asked_for():
    """vLLM: include_stop_str_in_output keeps the stop token, skip_special_tokens hides it."""
    for include, skip, text in [
        (False, True, "hi"),
        (False, False, "hi"),
        (True, True, "hi"),
        (True, False, "hi</s>"),
    ]:
        check = checker(include_stop_str_in_output=include, skip_special_tokens=skip)
        feed(check, [*b"hi", EOS])
        assert check.text() == text


def test_special_tokens_inside_the_text():
    for skip, text in [(True, "ab"), (False, "a<eot>b")]:
        check = checker(skip_special_tokens=skip, max_tokens=3)
        feed(check, [ord("a"), EOT, ord("b")])
        assert check.text() == text


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one END")])
def test_stop_string_over_tokens(include, text):
    check = checker(stop=("END",), include_stop_str_in_output=include)
    assert feed(check, b"one END two") == Finish(reason="stop", stop_reason="END")
    assert check.text() == text
    assert list(check.token_ids) == list(b"one END")


def test_stop_string_within_one_token_cuts_what_follows():
    pieces = ["one ", "tw", "o\n\nthree"]
    for include, text in [(False, "one two"), (True, "one two\n\n")]:
        check = StopChecker(
            SamplingParams(max_tokens=9, stop=("\n\n",), include_stop_str_in_output=include),
            eos_token_ids=(EOS,),
            prompt_len=1,
            max_model_len=99,
            open_stream=lambda skip: WordStream(pieces),
            decode=lambda ids, skip: "".join(pieces[i] for i in ids),
        )
        assert feed(check, range(3)) == Finish(reason="stop", stop_reason="\n\n")
        assert check.text() == text


def test_stop_string_over_utf8_boundaries():
    check = checker(stop=("é漢",))
    tokens = "naïveé漢字".encode()
    assert feed(check, tokens) == Finish(reason="stop", stop_reason="é漢")
    assert check.text() == "naïve"
    assert list(check.token_ids) == list("naïveé漢".encode())


def test_half_a_character_does_not_match():
    check = checker(stop=("é",), max_tokens=2)
    assert feed(check, [ord("a"), "é".encode()[0]]) == LENGTH
    assert check.text() == "a\N{REPLACEMENT CHARACTER}"


def test_the_match_that_is_complete_first_wins():
    """Not the first of the list, nor the one that begins first: how tokens cut must not matter."""
    check = checker(stop=("wxyz", "xy", "z"))
    assert feed(check, b"vwxyz") == Finish(reason="stop", stop_reason="xy")
    assert check.text() == "vw"


def test_of_two_that_end_together_the_longer_wins():
    check = checker(stop=("b", "ab"))
    assert feed(check, b"xab") == Finish(reason="stop", stop_reason="ab")
    assert check.text() == "x"


@given(
    st.text(alphabet="abé漢", max_size=30),
    st.lists(st.text(alphabet="abé漢", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
    st.data(),
)
@settings(deadline=None, max_examples=300)
def test_how_tokens_cut_the_text_does_not_matter(text, stops, include, data):
    """Against a search of every prefix of the text."""
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    check = StopChecker(
        SamplingParams(max_tokens=999, stop=tuple(stops), include_stop_str_in_output=include),
        eos_token_ids=(),
        prompt_len=0,
        max_model_len=999,
        open_stream=lambda skip: WordStream(pieces),
        decode=lambda ids, skip: "".join(pieces[i] for i in ids),
    )
    finish = feed(check, range(len(pieces)))
    ends = [e for e in range(len(text) + 1) if any(text[:e].endswith(stop) for stop in stops)]
    if not ends:
        assert finish is None
        assert check.text() == text
        return
    stop = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
    assert finish == Finish(reason="stop", stop_reason=stop)
    assert check.text() == text[: ends[0] if include else ends[0] - len(stop)]


def test_nothing_ends_before_min_tokens():
    check = checker(min_tokens=4, stop=("b",), stop_token_ids=(ord("c"),))
    for token in (EOS, ord("b"), ord("c")):
        assert check.forbidden_token_ids == (ord("c"), EOS)
        assert check.push(token) is None
    assert check.push(ord("b")) is None  # this token belongs to the first four
    assert check.forbidden_token_ids == ()
    assert check.push(ord("b")) == Finish(reason="stop", stop_reason="b")
    assert check.text() == "bcb"


def test_a_stop_string_may_begin_before_min_tokens_and_end_after():
    check = checker(min_tokens=2, stop=("ab",))
    assert feed(check, b"xab") == Finish(reason="stop", stop_reason="ab")
    assert check.text() == "x"


def test_what_min_tokens_passed_over_is_not_found_later():
    """A longer stop string keeps the old text in sight, but a match has to end in the new."""
    check = checker(min_tokens=2, stop=("b", "wxyz"), max_tokens=4)
    assert feed(check, b"abcd") == LENGTH
    assert check.text() == "abcd"


def test_a_special_token_may_be_a_stop_string_where_it_shows():
    tokens = [ord("a"), EOT, ord("b")]
    check = checker(stop=("<eot>",), skip_special_tokens=False)
    assert feed(check, tokens) == Finish(reason="stop", stop_reason="<eot>")
    assert check.text() == "a"
    assert feed(checker(stop=("<eot>",), max_tokens=3), tokens) == LENGTH


def test_eos_ends_once_min_tokens_are_there():
    check = checker(min_tokens=2)
    assert feed(check, [EOS, EOS, EOS]) == STOP
    assert len(check.token_ids) == 2


def test_max_tokens():
    check = checker(max_tokens=3)
    assert feed(check, b"abcdef") == LENGTH
    assert check.text() == "abc"


def test_the_context_limits_too():
    check = checker(max_tokens=50, prompt_len=6, max_model_len=8)
    assert feed(check, b"abcdef") == LENGTH
    assert check.text() == "ab"


def test_without_max_tokens_the_context_is_the_limit():
    check = checker(max_tokens=None, prompt_len=6, max_model_len=10)
    assert feed(check, b"abcdef") == LENGTH
    assert check.text() == "abcd"


def test_length_counts_even_before_min_tokens():
    assert feed(checker(min_tokens=9, max_tokens=2), b"abc") == LENGTH


def test_a_stop_at_the_last_token_is_a_stop():
    assert feed(checker(max_tokens=2), [ord("a"), EOS]) == STOP
    expected = Finish(reason="stop", stop_reason="b")
    assert feed(checker(max_tokens=2, stop=("b",)), b"ab") == expected


def test_text_with_stop_strings_that_never_came():
    check = checker(stop=("zz",), skip_special_tokens=False)
    assert feed(check, [*"é z".encode(), EOS]) == STOP
    assert check.text() == "é z"


def test_text_before_the_end():
    check = checker()
    feed(check, b"so far")
    assert check.finish is None
    assert check.text() == "so far"


def test_streams_only_for_stop_strings():
    ByteStream.opened = 0
    feed(checker(), b"abc")
    assert ByteStream.opened == 0
    feed(checker(stop=("x",)), b"abc")
    assert ByteStream.opened == 1


def test_a_token_after_the_end_is_our_bug():
    check = checker(max_tokens=1)
    check.push(1)
    with pytest.raises(AssertionError):
        check.push(2)
