"""`moebatch convert`: other formats and schemas, the same requests."""

from pathlib import Path

import pytest
from commands import moebatch, read_rows, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from moebatch.data.columns import ColumnNames, schema_of
from moebatch.data.convert import converter
from moebatch.data.requests import RawRow
from moebatch.data.rows import RowParser

FLAT = [
    {"id": "a", "prompt": "hi", "max_tokens": 5, "temperature": 0.5},
    {"id": "b", "messages": [{"role": "user", "content": "hé\u2028"}],
     "sampling_params": {"logprobs": 3, "stop": ["\n"]}},
    {"id": "c", "prompt_token_ids": [5, 6, 7]},
    {"id": "d", "prompt": ["one"], "sampling_params": {"logprobs": 2}},
    {"prompt": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"k": True}},
]  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "flat.jsonl", FLAT)
    return tmp_path


def raw(columns: dict, index: int = 0) -> RawRow:
    id_ = str(columns.get("custom_id", columns.get("id", index)))
    return RawRow(index=index, line=1, id=id_, schema=schema_of(columns), columns=columns)


def meaning(columns: dict) -> tuple:
    """What a model is asked, whatever the schema."""
    parsed = RowParser().parse(raw(columns))
    return (parsed.messages, parsed.text, parsed.token_ids, dict(parsed.overrides),
            dict(parsed.template_kwargs))  # fmt: skip


def to(schema: str, columns: dict) -> dict:
    return converter(schema, columns=ColumnNames())(raw(columns))[0]


@pytest.mark.parametrize("columns", FLAT)
def test_both_schemas_ask_the_same(columns) -> None:
    line = to("openai", columns)
    assert schema_of(line) == "openai"
    assert meaning(line) == meaning(columns)
    assert meaning(to("flat", line)) == meaning(columns)


texts = st.text(min_size=1, max_size=9).filter(lambda text: text.isprintable())
params = st.fixed_dictionaries({}, optional={
    "max_tokens": st.integers(1, 99), "temperature": st.floats(0, 2), "seed": st.integers(-9, 9),
    "stop": texts | st.lists(texts, max_size=2), "logprobs": st.integers(0, 20),
    "n": st.integers(1, 9), "ignore_eos": st.booleans(), "top_k": st.none() | st.just(-1),
})  # fmt: skip
prompts = st.one_of(
    st.fixed_dictionaries({"prompt": texts}),
    st.fixed_dictionaries({"prompt_token_ids": st.lists(st.integers(0, 99), min_size=1)}),
    st.fixed_dictionaries({"messages": st.lists(
        st.fixed_dictionaries({"role": st.just("user"), "content": texts}), min_size=1)}),
)  # fmt: skip


@settings(deadline=None)
@given(prompts, params, texts)
def test_any_flat_row_goes_there_and_back(prompt, said, id_) -> None:
    columns = {"id": id_, **prompt, "sampling_params": said}
    line = to("openai", columns)
    assert line["custom_id"] == id_
    assert meaning(line) == meaning(columns)
    back = to("flat", line)
    assert back["id"] == id_
    assert meaning(back) == meaning(columns)


def test_to_a_table_and_back_nothing_is_lost(here) -> None:
    assert moebatch("convert", "flat.jsonl", "-o", "t.parquet").code == 0
    assert moebatch("convert", "t.parquet", "-o", "back.jsonl").code == 0
    back = read_rows(here / "back.jsonl")
    assert [{k: v for k, v in row.items() if v is not None} for row in back] == FLAT


def test_openai_lines_through_a_table(here) -> None:
    assert moebatch("convert", "flat.jsonl", "-o", "o.parquet", "--schema", "openai").code == 0
    assert moebatch("convert", "o.parquet", "-o", "back.jsonl", "--to", "flat").code == 0
    asked = [meaning(row) for row in read_rows(here / "back.jsonl")]
    assert asked == [meaning(row) for row in FLAT]


def test_what_has_no_place_is_said(here) -> None:
    write_rows(here / "in.jsonl", [{"prompt": "a", "label": 3, "temperature": "hot"}])
    result = moebatch("convert", "in.jsonl", "-o", "-", "--to", "openai", "--model-name", "m")
    assert result.code == 0
    assert '"model": "m"' in result.out
    assert "'label'" in result.err
    assert "'temperature'" in result.err


def test_answers_become_columns(here) -> None:
    write_rows(here / "in.jsonl", [{"custom_id": "x", "body": {"prompt": "a", "max_tokens": 2}},
                                   {"custom_id": "y", "body": {"prompt": ""}}])  # fmt: skip
    assert moebatch("run", "in.jsonl", "-m", "demo", "-o", "out.jsonl", "-q").code == 3
    assert moebatch("convert", "out.jsonl", "-o", "flat.out.jsonl", "--to", "flat").code == 0
    good, bad = read_rows(here / "flat.out.jsonl")
    (answer,) = read_rows(here / "out.jsonl")[0]["response"]["body"]["choices"]
    assert (good["id"], good["generated_text"]) == ("x", answer["text"])
    assert good["completion_tokens"] == 2
    assert (bad["id"], bad["error"]["code"]) == ("y", "invalid_request")


@pytest.mark.parametrize(
    ("content", "args", "code", "word"),
    [
        (b'{"prompt":"a"}\nnonsense\n', [], 6, "in.jsonl:2"),
        (b'{"other":"a"}\n', ["--to", "openai"], 6, "missing_prompt"),
        (b'{"custom_id":"a","body":[]}\n', ["--to", "flat"], 6, "body"),
        (b'{"custom_id":"a","url":"/v1/embeddings","body":{}}\n', ["--to", "flat"], 6, "url"),
        (b'{"custom_id":"a","response":{"body":{"choices":[5]}}}\n', ["--to", "flat"], 6, "OpenAI"),
        (b"", [], 6, "no rows"),
        (b'{"prompt":"a"}\n', ["--to", "xml"], 2, "--schema"),
        (b'{"prompt":"a"}\n', ["--output-format", "csv"], 2, "--output-format"),
        (b'{"prompt":"a"}\n', ["--prompt-column", "q"], 6, "'q'"),
    ],
)
def test_what_cannot_be_converted_leaves_nothing(here, content, args, code, word) -> None:
    (here / "in.jsonl").write_bytes(content)
    result = moebatch("convert", "in.jsonl", "-o", "out.jsonl", *args)
    assert result.code == code
    assert word in result.error
    assert not list(here.glob("out.jsonl*"))


def test_outputs_are_kept_safe(here) -> None:
    (here / "there.jsonl").write_text("precious")
    assert moebatch("convert", "flat.jsonl", "-o", "there.jsonl").code == 8
    assert moebatch("convert", "flat.jsonl", "-o", "flat.jsonl", "--overwrite").code == 2
    assert (here / "there.jsonl").read_text() == "precious"
    assert moebatch("convert", "flat.jsonl", "-o", "there.jsonl", "--overwrite").code == 0
    assert read_rows(here / "there.jsonl") == FLAT
