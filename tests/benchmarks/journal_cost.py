"""What keeping the work costs: the demo model with and without a journal, in turns.

Without: the output is a pipe, for which nothing is kept. Prints each run, the medians, and one line
of JSON. Run it on a quiet machine: python tests/benchmarks/journal_cost.py [pairs] [rows] [tokens]
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median


def run(data: Path, folder: Path, tokens: int, *, keep: bool, flags: list[str]) -> dict:
    """One run's report, with the rate over everything but loading."""
    report, out = folder / "report.json", folder / "out.jsonl"
    command = [
        sys.executable, "-m", "moebatch", "run", str(data), "-m", "demo",
        "-o", str(out) if keep else "-", "--overwrite", "--report", str(report),
        "--max-tokens", str(tokens), "--ignore-eos", "--progress", "none", "-q", *flags,
    ]  # fmt: skip
    with open(folder / "stdout", "wb") as stdout:
        subprocess.run(command, check=True, stdout=stdout)
    said = json.loads(report.read_text())
    seconds = said["time_s"]["total"] - said["time_s"]["load"]
    said["rate"] = said["tokens"]["generated"] / seconds
    return said


def main(pairs: int = 5, rows: int = 300, tokens: int = 64, *flags: str) -> None:
    """Run `pairs` pairs and print what they say."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    shares = []
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        data = folder / "in.jsonl"
        lines = [{"id": str(i), "prompt": "Once upon a time " * (1 + i % 4)} for i in range(rows)]
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        for pair in range(pairs):
            for keep in (True, False) if pair % 2 else (False, True):
                said = run(data, folder, tokens, keep=keep, flags=list(flags))
                rates[keep].append(said["rate"])
                if keep:
                    cost = said["journal"]
                    shares.append(
                        (cost["journal_s"] + cost["checkpoint_s"]) / said["time_s"]["total"]
                    )
                print(f"{'kept' if keep else 'not kept':<9} {said['rate']:8.1f} tok/s")
    kept, plain = median(rates[True]), median(rates[False])
    result = {
        "kept_tok_s": kept,
        "plain_tok_s": plain,
        "cost": 1 - kept / plain,
        "share_of_time_in_journal_and_checkpoints": median(shares),
        "pairs": pairs,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    numbers = [int(arg) for arg in sys.argv[1:4]]
    main(*numbers, *sys.argv[4:])
