"""Rows become requests: prompt forms, parameters, defaults, lengths; a bad row is a value."""

import dataclasses
import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import CHAT_TEMPLATE, write_byte_level

from moebatch.data.chat import ChatTemplate
from moebatch.data.columns import ColumnNames, schema_of
from moebatch.data.params import sampling_defaults
from moebatch.data.parse import RequestBuilder
from moebatch.data.requests import RawRow, Request, RowError, SamplingParams
from moebatch.data.tokenizer import Tokenizer, load_tokenizer
from moebatch.errors import ModelError, UsageError

BOS = 0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_byte_level(tmp_path_factory.mktemp("model")))


@pytest.fixture
def make(tokenizer):
    """A builder with test-sized defaults, any of which a test may change."""

    def builder(**options):
        template = ChatTemplate(
            CHAT_TEMPLATE, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, name="t"
        )
        said = {
            "chat_template": template,
            "defaults": SamplingParams(),
            "vocab_size": tokenizer.vocab_size,
            "max_model_len": 1000,
        }
        return RequestBuilder(tokenizer, **(said | options))

    return builder


def row(columns):
    return RawRow(index=3, line=9, id="r", schema=schema_of(columns), columns=columns)


def chat(**body):
    said = {"messages": [{"role": "user", "content": "hi"}]} | body
    return row({"custom_id": "c", "url": "/v1/chat/completions", "body": said})


def completion(**body):
    return row({"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "hi"} | body})


def flat(**columns):
    return row({"prompt": "hi"} | columns)


def text_of(tokenizer, request):
    assert isinstance(request, Request), request
    return tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)


def refused(error, code, param=None):
    assert isinstance(error, RowError), error
    assert (error.code, error.index, error.id, error.line) == (code, 3, "r", 9)
    assert error.raw is not None
    if param is not None:
        assert error.param == param
    assert error.message and "\n" not in error.message


# --- prompts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": "hi"},
        {"text": "hi"},
        {"input": "hi"},
        {"prompt": "hi", "text": "no", "input": "no"},
        {"prompt": None, "text": "hi"},
        {"prompt": ["hi"]},
        {"body": {"prompt": "hi"}, "custom_id": "c"},
        {"body": '{"prompt": "hi"}', "url": "/v1/completions"},
        {"body": {"prompt": ["hi"]}, "url": "/v1/completions"},
        {"prompt": "<s>hi"},
    ],
)
def test_raw_prompts_get_one_bos(make, tokenizer, columns):
    request = make().build(row(columns))
    assert text_of(tokenizer, request) == "<s>hi"
    assert request.prompt_token_ids.count(BOS) == 1
    assert (request.index, request.id) == (3, "r")


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "columns",
    [
        {"messages": MESSAGES},
        {"messages": '[{"role": "user", "content": "hi"}]'},
        {"messages": [{"role": "user", "content": "hi", "name": None, "tool_calls": None}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, "i"]}]},
        {"messages": MESSAGES, "prompt": "no"},
        {"prompt": MESSAGES},
        {"custom_id": "c", "url": "/v1/chat/completions", "body": {"messages": MESSAGES}},
        {"custom_id": "c", "body": {"messages": MESSAGES}},
    ],
)
def test_messages_are_rendered_and_get_no_second_bos(make, tokenizer, columns):
    request = make().build(row(columns))
    assert text_of(tokenizer, request) == "<s><user>hi</s><assistant>"
    assert request.prompt_token_ids.count(BOS) == 1


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt_token_ids": [5, 6, 7]},
        {"prompt_token_ids": "[5, 6, 7]"},
        {"prompt_token_ids": [5, 6, 7], "messages": MESSAGES, "prompt": "no"},
        {"prompt": [5, 6, 7]},
        {"body": {"prompt": [5, 6, 7]}, "url": "/v1/completions"},
        {"body": {"prompt": [[5, 6, 7]]}, "url": "/v1/completions"},
    ],
)
def test_token_ids_are_taken_as_they_are(make, columns):
    assert make().build(row(columns)).prompt_token_ids == (5, 6, 7)


def test_a_text_that_looks_like_json_stays_a_text(make, tokenizer):
    for prompt in ("[1, 2]", '{"a": 1}', '[{"role": "user"}]'):
        assert text_of(tokenizer, make().build(flat(prompt=prompt))) == "<s>" + prompt
        assert text_of(tokenizer, make().build(completion(prompt=prompt))) == "<s>" + prompt


def test_named_columns_win(make, tokenizer):
    columns = {"messages": MESSAGES, "prompt": "no", "question": "why", "talk": MESSAGES}
    by_name = make(columns=ColumnNames(prompt="question"))
    assert text_of(tokenizer, by_name.build(row(columns))) == "<s>why"
    refused(by_name.build(row({"prompt": "p"})), "missing_prompt")
    talk = make(columns=ColumnNames(messages="talk")).build(row(columns))
    assert text_of(tokenizer, talk).startswith("<s><user>")


@pytest.mark.parametrize(
    ("columns", "code", "param"),
    [
        ({"other": 1}, "missing_prompt", None),
        ({"prompt": None}, "missing_prompt", None),
        ({"body": {}, "url": "/v1/chat/completions"}, "missing_prompt", "messages"),
        ({"body": {"prompt": []}, "url": "/v1/completions"}, "invalid_request", "prompt"),
        ({"prompt": ""}, "invalid_request", "prompt"),
        ({"prompt": 5}, "invalid_request", "prompt"),
        ({"prompt": [1, True]}, "invalid_request", "prompt"),
        ({"prompt": [1, 2.5]}, "invalid_request", "prompt"),
        ({"prompt": [1, -1]}, "invalid_request", "prompt"),
        ({"prompt": [1, 10**6]}, "invalid_request", "prompt"),
        ({"prompt": "a\ud800"}, "invalid_request", "prompt"),
        ({"prompt": ["a", "b"]}, "unsupported_parameter", "prompt"),
        ({"prompt": [[1], [2]]}, "unsupported_parameter", "prompt"),
        ({"messages": []}, "invalid_request", "messages"),
        ({"messages": "hi"}, "invalid_request", "messages"),
        ({"messages": ["hi"]}, "invalid_request", "messages[0]"),
        ({"messages": [{"content": "x"}]}, "invalid_request", "messages[0]"),
        ({"messages": [{"role": "user"}]}, "invalid_request", "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "invalid_request",
            "messages[0].content",
        ),
        (
            {"messages": [*MESSAGES, {"role": "user", "content": [{"type": "image_url"}]}]},
            "unsupported_parameter",
            "messages[1].content",
        ),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "unsupported_parameter",
            "messages[0]",
        ),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
            "unsupported_parameter",
            "messages[0]",
        ),
        ({"custom_id": "c", "body": 5}, "invalid_request", "body"),
        ({"custom_id": "c", "body": "no json"}, "invalid_request", "body"),
        ({"body": {}, "url": "/v1/embeddings"}, "unsupported_parameter", "url"),
        ({"prompt": "x", "sampling_params": [1]}, "invalid_request", "sampling_params"),
        ({"prompt": "x", "tools": [{}]}, "unsupported_parameter", "tools"),
    ],
)
def test_rows_that_hold_no_usable_prompt(make, columns, code, param):
    refused(make().build(row(columns)), code, param)


def test_system_messages_and_the_template_switch(make, tokenizer):
    with_system = make(system="S")
    assert text_of(tokenizer, with_system.build(chat())).startswith("<s><system>S</s><user>")
    own = chat(messages=[{"role": "system", "content": "own"}, *MESSAGES])
    assert text_of(tokenizer, with_system.build(own)).startswith("<s><system>own</s><user>")
    assert with_system.warnings == ["rows without max_tokens get 256, or what the context leaves"]
    assert text_of(tokenizer, with_system.build(flat())) == "<s>hi"
    assert "system message" in with_system.warnings[-1]
    always = make(apply_chat_template="always").build(flat())
    assert text_of(tokenizer, always) == "<s><user>hi</s><assistant>"
    refused(make(apply_chat_template="never").build(chat()), "chat_template_error", "messages")


def test_template_failures_are_row_errors(make):
    refused(make(chat_template=None).build(chat()), "chat_template_error", "messages")
    angry = ChatTemplate("{{ raise_exception('no\n!') }}", special_tokens={}, name="t")
    error = make(chat_template=angry).build(chat())
    refused(error, "chat_template_error")
    assert "no !" in error.message
    empty = ChatTemplate("", special_tokens={}, name="t")
    refused(make(chat_template=empty).build(chat()), "invalid_request")


def test_template_kwargs_reach_the_template(make, tokenizer):
    template = ChatTemplate("{{ mode }}", special_tokens={}, name="t")
    request = make(chat_template=template).build(chat(chat_template_kwargs={"mode": "deep"}))
    assert text_of(tokenizer, request) == "deep"


# --- parameters -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "field", "value"),
    [
        ({"max_tokens": 5}, "max_tokens", 5),
        ({"max_completion_tokens": 5}, "max_tokens", 5),
        ({"max_new_tokens": 5.0}, "max_tokens", 5),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", 5),
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": None}, "temperature", 1.0),
        ({"top_p": 1}, "top_p", 1.0),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 0}, "top_k", 0),
        ({"top_k": 40}, "top_k", 40),
        ({"min_p": 0.1}, "min_p", 0.1),
        ({"n": 3}, "n", 3),
        ({"seed": -(2**63)}, "seed", -(2**63)),
        ({"stop": "x"}, "stop", ("x",)),
        ({"stop": ["x", "y\n"]}, "stop", ("x", "y\n")),
        ({"stop": None}, "stop", ()),
        ({"stop_token_ids": [4]}, "stop_token_ids", (4,)),
        ({"repetition_penalty": 1.1}, "repetition_penalty", 1.1),
        ({"presence_penalty": -2}, "presence_penalty", -2.0),
        ({"frequency_penalty": 0.5}, "frequency_penalty", 0.5),
        ({"logit_bias": {"7": -100, "5": 1}}, "logit_bias", ((5, 1.0), (7, -100.0))),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"min_tokens": 2}, "min_tokens", 2),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output", True),
        ({"skip_special_tokens": False}, "skip_special_tokens", False),
    ],
)
def test_parameters_are_read_in_both_schemas(make, said, field, value):
    for built in (chat(**said), completion(**said), flat(sampling_params=said)):
        assert getattr(make().build(built).params, field) == value


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", [0, -1, "5", True, 1.5, [5]]),
        ("max_completion_tokens", [0]),
        ("min_tokens", [-1, True]),
        ("temperature", [-0.1, "1", math.inf, math.nan, True, 10**400]),
        ("top_p", [0, 1.01, -1, math.nan]),
        ("top_k", [-2, 1.5, True]),
        ("min_p", [-0.1, 1.1]),
        ("n", [0, True, 129]),
        ("seed", [2**63, -(2**63) - 1, 1.5, "1"]),
        ("stop", ["", ["a", ""], [1], 5]),
        ("stop_token_ids", [[-1], ["a"], 5, [True], [10**6]]),
        ("repetition_penalty", [0, -1]),
        ("presence_penalty", [2.1]),
        ("frequency_penalty", [-2.1]),
        ("logit_bias", [[1], {"a": 1}, {"1": 101}, {"1": "x"}, {"999999": 1}]),
        ("ignore_eos", [1, "true"]),
        ("logprobs", ["x", [1]]),
    ],
)
def test_bad_values_name_the_parameter(make, name, values):
    for value in values:
        refused(make().build(chat(**{name: value})), "invalid_request", name)
        refused(make().build(flat(sampling_params={name: value})), "invalid_request", name)


def test_values_that_contradict_each_other(make):
    refused(make().build(chat(max_tokens=5, max_new_tokens=6)), "invalid_request", "max_new_tokens")
    refused(make().build(chat(max_tokens=5, min_tokens=6)), "invalid_request", "min_tokens")


@pytest.mark.parametrize(
    ("built", "expected"),
    [
        (chat(logprobs=True), 0),
        (chat(logprobs=True, top_logprobs=5), 5),
        (chat(logprobs=False), None),
        (completion(logprobs=5), 5),
        (completion(logprobs=0), 0),
        (completion(logprobs=None), None),
        (flat(sampling_params={"logprobs": 3}), 3),
        (flat(sampling_params={"logprobs": True, "top_logprobs": 2}), 2),
    ],
)
def test_logprobs_in_each_form(make, built, expected):
    assert make().build(built).params.logprobs == expected


@pytest.mark.parametrize(
    ("built", "param"),
    [
        (chat(logprobs=3), "logprobs"),
        (chat(top_logprobs=3), "top_logprobs"),
        (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
        (completion(logprobs=True), "logprobs"),
        (completion(logprobs=21), "logprobs"),
    ],
)
def test_logprobs_in_a_wrong_form(make, built, param):
    refused(make().build(built), "invalid_request", param)


@pytest.mark.parametrize(
    ("name", "harmless", "refusal"),
    [
        ("tools", [], [{"type": "function"}]),
        ("response_format", {"type": "text"}, {"type": "json_object"}),
        ("echo", False, True),
        ("best_of", 1, 2),
        ("suffix", None, "end"),
        ("tool_choice", "none", "required"),
        ("prompt_logprobs", None, 1),
        ("guided_regex", None, "a*"),
        ("continue_final_message", False, True),
    ],
)
def test_what_would_change_the_output_is_refused(make, name, harmless, refusal):
    builder = make()
    assert isinstance(builder.build(chat(**{name: harmless})), Request)
    refused(builder.build(chat(**{name: refusal})), "unsupported_parameter", name)
    refused(builder.build(flat(sampling_params={name: refusal})), "unsupported_parameter", name)


def test_unknown_fields_warn_once_or_fail_when_strict(make):
    builder = make(model_name="served")
    for _ in range(3):
        builder.build(chat(max_tokens=1, magic=1, stream=True, model="other", user="me"))
        builder.build(chat(max_tokens=1, magic=2, wand=3, model="served", unsaid=None))
    assert len(builder.warnings) == 4
    for word, warning in zip(("stream", "'other'", "magic", "wand"), builder.warnings, strict=True):
        assert word in warning
    refused(make(strict=True).build(chat(magic=1)), "unsupported_parameter", "magic")
    refused(
        make(strict=True).build(flat(sampling_params={"magic": 1})),
        "unsupported_parameter",
        "magic",
    )
    assert isinstance(make(strict=True).build(flat(any_column=1)), Request)


def test_flat_columns_count_when_they_have_the_right_type(make):
    params = make().build(flat(max_new_tokens=7, temperature=0, seed=5, stop=["x"])).params
    assert (params.max_tokens, params.temperature, params.seed) == (7, 0.0, 5)
    assert params.stop == ("x",)
    other = flat(max_tokens="7x", temperature="hot", seed=None, stop="", n=9, top_p=math.nan)
    kept = make(defaults=SamplingParams(max_tokens=3)).build(other).params
    assert kept == SamplingParams(max_tokens=3)
    refused(make().build(flat(temperature=-1)), "invalid_request", "temperature")
    both = flat(max_tokens=5, sampling_params={"max_new_tokens": 6})
    assert make().build(both).params.max_tokens == 6


def test_numbers_written_as_text_count_too(make):
    """A CSV file has no other way to write them."""
    builder = make()
    row = flat(max_tokens="7", temperature=" 0.5", seed="-3", ignore_eos="True", top_k="")
    params = builder.build(row).params
    assert (params.max_tokens, params.temperature, params.seed) == (7, 0.5, -3)
    assert params.ignore_eos is True
    assert "max_tokens" not in " ".join(builder.warnings)


def test_a_column_that_only_looks_like_a_parameter_is_named_once(make):
    builder = make(defaults=SamplingParams(max_tokens=3))
    for _ in range(3):
        assert builder.build(flat(temperature="hot", top_p=[1])).params.temperature == 1.0
    assert [text for text in builder.warnings if "'temperature'" in text] == [builder.warnings[0]]
    assert "'top_p'" in builder.warnings[1]
    assert len(builder.warnings) == 2


def test_a_flag_that_fits_no_row_is_refused_before_the_rows(make):
    with pytest.raises(UsageError, match="--stop-token-id 999999"):
        make(defaults=SamplingParams(stop_token_ids=(999999,)))


def test_a_fault_of_ours_is_an_error_of_its_row(make, monkeypatch):
    builder = make()
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: 1 / 0)
    error = builder.build(flat())
    assert (error.code, error.retryable, error.line) == ("internal_error", True, 9)
    assert "ZeroDivisionError" in error.message


def test_a_row_wins_over_the_defaults(make):
    defaults = SamplingParams(temperature=0.5, top_p=0.9, stop=("a",), max_tokens=8)
    params = make(defaults=defaults).build(chat(temperature=0.1, stop="b")).params
    assert params == dataclasses.replace(defaults, temperature=0.1, stop=("b",))


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            ["prompt", "messages", "prompt_token_ids", "body", "url", "sampling_params", "stop"]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(
                        ["role", "content", "type", "text", "messages", "prompt", "n", "logit_bias"]
                    ),
                    inner,
                    max_size=3,
                )
            ),
            max_leaves=6,
        ),
    )
)
def test_any_row_gives_a_request_or_an_error(tokenizer, columns):
    template = ChatTemplate(CHAT_TEMPLATE, special_tokens={}, name="t")
    builder = RequestBuilder(
        tokenizer,
        chat_template=template,
        defaults=SamplingParams(),
        vocab_size=tokenizer.vocab_size,
        max_model_len=64,
    )
    built = builder.build(row(columns))
    if isinstance(built, Request):
        assert 1 <= len(built.prompt_token_ids) < 64
        assert len(built.prompt_token_ids) + built.params.max_tokens <= 64
    else:
        refused(built, built.code)


# --- lengths --------------------------------------------------------------------------------------


def ids(count):
    return row({"prompt_token_ids": list(range(2, 2 + count))})


@pytest.mark.parametrize("text", ["x" * 400_000, "one two " * 50_000])
def test_a_hopeless_prompt_is_not_encoded_to_its_end(make, monkeypatch, text):
    """Ten megabytes on a line took eleven seconds each; the verdict is that of encoding it all."""
    full = make(max_model_len=99)
    most = 0
    encode = Tokenizer.encode

    def counted(self, text, *, add_special_tokens):
        nonlocal most
        most = max(most, len(text))
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    error = full.build(row({"prompt": text}))
    assert (error.code, error.param, error.skipped) == ("context_length_exceeded", "prompt", False)
    assert most < 2000
    assert make(max_model_len=99, on_too_long="skip").build(row({"prompt": text})).skipped
    cut = make(max_model_len=99, on_too_long="truncate").build(row({"prompt": text[:9999]}))
    assert len(cut.prompt_token_ids) < 99


def test_max_tokens_is_filled_in_and_clamped(make):
    builder = make(max_model_len=300)
    unsaid = builder.build(ids(10))
    assert (unsaid.params.max_tokens, unsaid.clamped_from) == (256, None)
    assert len(builder.warnings) == 1
    little_room = builder.build(ids(100))
    assert (little_room.params.max_tokens, little_room.clamped_from) == (200, None)
    asked = make(max_model_len=300, defaults=SamplingParams(max_tokens=290, min_tokens=250))
    assert asked.build(ids(10)).params.max_tokens == 290
    clamped = asked.build(ids(100))
    assert (clamped.params.max_tokens, clamped.clamped_from) == (200, 290)
    assert clamped.params.min_tokens == 200
    at_least = make(defaults=SamplingParams(min_tokens=400)).build(ids(10))
    assert at_least.params.max_tokens == 400


def test_a_prompt_that_fills_the_context_is_an_error_or_skipped(make):
    error = make(max_model_len=50).build(ids(50))
    refused(error, "context_length_exceeded", "prompt_token_ids")
    assert "50 tokens" in error.message and not error.skipped
    assert isinstance(make(max_model_len=50).build(ids(49)), Request)
    skipped = make(max_model_len=50, on_too_long="skip").build(ids(60))
    refused(skipped, "context_length_exceeded")
    assert skipped.skipped and skipped.message.startswith("skipped")


@pytest.mark.parametrize(
    ("side", "kept"),
    [
        ("left", list(range(22, 62))),
        ("right", list(range(2, 42))),
        ("middle", [*range(2, 22), *range(42, 62)]),
    ],
)
def test_truncation_leaves_room_for_the_answer(make, side, kept):
    builder = make(
        max_model_len=50,
        on_too_long="truncate",
        truncation_side=side,
        defaults=SamplingParams(max_tokens=10),
    )
    request = builder.build(ids(60))
    assert list(request.prompt_token_ids) == kept
    assert (request.truncated_tokens, request.params.max_tokens) == (20, 10)
    assert request.clamped_from is None
    assert builder.build(ids(45)).truncated_tokens == 0


def test_truncation_when_the_answer_alone_fills_the_context(make):
    builder = make(max_model_len=50, on_too_long="truncate")
    request = builder.build(ids(60))
    assert (len(request.prompt_token_ids), request.params.max_tokens) == (25, 25)
    asked = make(
        max_model_len=50, on_too_long="truncate", defaults=SamplingParams(max_tokens=99)
    ).build(ids(60))
    assert (asked.params.max_tokens, asked.clamped_from, asked.truncated_tokens) == (25, 99, 35)


def test_truncation_keeps_the_bos(make):
    builder = make(max_model_len=8, on_too_long="truncate", defaults=SamplingParams(max_tokens=4))
    request = builder.build(row({"prompt_token_ids": [BOS, *range(10, 30)]}))
    assert request.prompt_token_ids == (BOS, 27, 28, 29)
    assert request.truncated_tokens == 17


# --- defaults -------------------------------------------------------------------------------------


def test_defaults_come_from_the_file_then_from_the_flags():
    config = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 50,
        "max_new_tokens": 99,
        "eos_token_id": 2,
    }
    assert sampling_defaults(None, {}) == SamplingParams()
    assert sampling_defaults(config, {}) == SamplingParams(
        temperature=0.6, top_p=0.9, top_k=50, max_tokens=99
    )
    flags = {"temperature": 0.1, "max_tokens": 5, "stop": ["x"], "top_p": None}
    assert sampling_defaults(config, flags) == SamplingParams(
        temperature=0.1, top_p=0.9, top_k=50, max_tokens=5, stop=("x",)
    )


def test_only_an_explicit_do_sample_false_is_greedy():
    assert sampling_defaults({"do_sample": False, "temperature": 0.6}, {}).temperature == 0
    assert sampling_defaults({"do_sample": True}, {}).temperature == 1
    assert sampling_defaults({"do_sample": None}, {}).temperature == 1
    assert sampling_defaults({"do_sample": False}, {"temperature": 0.7}).temperature == 0.7


def test_bad_defaults_blame_the_file_or_the_flag():
    with pytest.raises(ModelError, match=r"generation_config\.json: temperature"):
        sampling_defaults({"temperature": "hot"}, {})
    for flags in ({"temperature": -1}, {"min_tokens": 5, "max_tokens": 4}, {"magic": 1}):
        with pytest.raises(UsageError):
            sampling_defaults(None, flags)


def test_importing_the_data_package_loads_no_heavy_library():
    """Guards `--help` under half a second; heavy libraries are imported where they are used."""
    script = """
import importlib, pkgutil, sys
import moebatch.data
for module in pkgutil.iter_modules(moebatch.data.__path__):
    importlib.import_module(f"moebatch.data.{module.name}")
heavy = "torch pyarrow datasets tokenizers sentencepiece jinja2 transformers".split()
sys.exit(" ".join(name for name in heavy if name in sys.modules) or 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
