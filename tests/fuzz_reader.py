"""Throws bytes at everything between a file and its output rows, without an engine.

As a script it goes on for a while: python tests/fuzz_reader.py --seconds 300 --seed 1
"""

import argparse
import gzip
import json
import random
import tempfile
import time
from functools import cache
from pathlib import Path

import moebatch
from moebatch.data.chat import load_chat_template
from moebatch.data.dataset import Dataset
from moebatch.data.json_text import to_json
from moebatch.data.output_rows import RowFormat, output_row
from moebatch.data.parse import RequestBuilder
from moebatch.data.requests import Choice, Completion, RowError, SamplingParams
from moebatch.data.tokenizer import load_tokenizer
from moebatch.errors import InputError

MODEL = Path(moebatch.__file__).parent / "demo" / "model"
FORMAT = RowFormat(model_name="m", run_id="r")
BOM = b"\xef\xbb\xbf"


@cache
def builder() -> RequestBuilder:
    return RequestBuilder(
        load_tokenizer(MODEL),
        chat_template=load_chat_template(MODEL),
        defaults=SamplingParams(max_tokens=1),
        vocab_size=2048,
        max_model_len=512,
    )


def output_lines(path: Path) -> list[bytes]:
    """What a run writes for a file, if the model answers every request with nothing."""
    lines = []
    with Dataset([str(path)]) as data:
        survey = data.survey(on_duplicate="row-error")
        for row in data.rows(survey):
            made = row if isinstance(row, RowError) else builder().build(row)
            raw = row.raw if isinstance(row, RowError) else row
            if not isinstance(made, RowError):
                choices = [Choice(index=i, token_ids=(), text="", finish_reason="length")
                           for i in range(made.params.n)]  # fmt: skip
                made = Completion(request=made, choices=tuple(choices))
            schema = FORMAT.schema_for(raw, previous="flat")
            lines.append(to_json(output_row(raw, made, schema=schema, format=FORMAT)).encode())
        assert survey.num_rows == len(lines)
    return lines


def check(path: Path, data: bytes) -> int:
    """One output row for each line of JSON that is not blank, or one refusal of the whole file.

    Returns the number of rows; raises AssertionError, or whatever escapes, which nothing may.
    """
    path.write_bytes(data)
    try:
        lines = output_lines(path)
    except InputError as error:
        assert "\n" not in str(error)
        lines = []
        if path.suffix == ".jsonl" and not data.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
            assert "no rows" in str(error)
    for line in lines:
        assert b"\n" not in line
        assert isinstance(json.loads(line, parse_constant=_refuse), dict)
        assert b'"internal_error"' not in line
    if path.suffix == ".jsonl" and not data.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
        wanted = [line for line in data.removeprefix(BOM).split(b"\n") if line.strip()]
        assert len(lines) == len(wanted)
    return len(lines)


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


# --- inputs that are nearly right -----------------------------------------------------------------

SEEDS = [
    b'{"id":"a","prompt":"hello","max_tokens":5}',
    b'{"custom_id":"r","method":"POST","url":"/v1/chat/completions","body":{"messages":'
    b'[{"role":"user","content":[{"type":"text","text":"hi"}]}],"logprobs":true,"top_logprobs":2}}',
    b'{"custom_id":"s","url":"/v1/completions","body":{"prompt":[1,2,3],"stop":["\\n"],"n":2}}',
    b'{"messages":[{"role":"system","content":"s"},{"role":"user","content":"\xc3\xa9\\ud83d"}]}',
    b'{"prompt_token_ids":[5,6],"sampling_params":{"logit_bias":{"5":1.5},"seed":-3}}',
    b'{"text":"x","temperature":"0.5","stop":"x","ignore_eos":null}',
    BOM + b'{"input":[[1,2]]}\r',
    b"",
    b"id,prompt,max_tokens",
    b'1,"two\nlines",5',
]
TOKENS = [
    b'"', b"{", b"}", b"[", b"]", b":", b",", b"\\", b"\n", b"\r", b"\x00", b"\xff", b"\xfe",
    b"\xed\xa0\x80", b"\\ud800", b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"9" * 40,
    b"-1", b"[" * 120, b'"body":', b'"custom_id":', b'"messages":', b'"prompt":', b'"role":',
    b'"content":', b'"sampling_params":', b'"stop":', b'"n":', b'"logprobs":', b"\xe2\x80\xa8",
    b'"type":"text",', b'"tools":[{}],', b'"chat_template_kwargs":', b'"url":', b"\x1f\x8b",
]  # fmt: skip


def mutated(rng: random.Random) -> bytes:
    """Some lines with some damage."""
    data = bytearray(b"\n".join(rng.choices(SEEDS, k=rng.randint(1, 6))))
    for _ in range(rng.choice([0, 1, 1, 2, 4, 9])):
        at = rng.randint(0, len(data))
        kind = rng.random()
        if kind < 0.5:
            data[at:at] = rng.choice(TOKENS)
        elif kind < 0.7:
            del data[at : at + rng.choice([1, 1, 3, 10])]
        elif kind < 0.85 and data:
            data[min(at, len(data) - 1)] = rng.randrange(256)
        else:
            part = data[at : at + rng.randint(1, 30)]
            place = rng.randint(0, len(data))
            data[place:place] = part
    return bytes(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    end, cases, rows = time.monotonic() + args.seconds, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < end:
            data = mutated(rng) if rng.random() < 0.9 else rng.randbytes(rng.randint(0, 300))
            name = rng.choices(["x.jsonl", "x.csv", "x.txt", "x.json", "x.parquet", "x.jsonl.gz"],
                               weights=[80, 8, 4, 4, 2, 2])[0]  # fmt: skip
            if name.endswith(".gz"):
                data = gzip.compress(data)[: rng.choice([None, None, -1, 15])]
            try:
                rows += check(Path(folder) / name, data)
            except BaseException:
                print(f"case {cases}: {name}: {data!r}")
                raise
            cases += 1
    print(f"{cases:,} files, {rows:,} output rows, nothing escaped")


if __name__ == "__main__":
    main()
