"""transformers' generate(), in memory or by accelerate with what does not fit on disk.

Prompts are sorted by length and padded at the left within a batch of `options["batch"]`; lengths are
forced. With `options["offload"]` accelerate places as many layers in memory as the limit leaves room
for. `options["tokens"]` generates fewer tokens a row and `options["rows"]` takes fewer rows.
"""

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

_LIBRARIES_BYTES = 800 << 20  # what Python, torch and transformers hold before any weights


def main(path: str) -> None:
    """Run a task and print what happened."""
    import torch

    task = json.loads(Path(path).read_text())
    options = task["options"]
    torch.set_num_threads(task["threads"])
    model = _load(task)
    if task["warm_up"]:
        _generate(model, _rows(task["warm_up"])[:1], options["batch"], None)
    rows = sorted(_rows(task["rows"]), key=lambda row: len(row["prompt_token_ids"]))
    rows = _spread(rows, options.get("rows"), options["batch"])
    start = time.perf_counter()
    generated = _generate(model, rows, options["batch"], options.get("tokens"))
    seconds = time.perf_counter() - start
    name = "accelerate" if options.get("offload") else "transformers"
    done = {
        "event": "done",
        "generated": generated,
        "seconds": seconds,
        "rows": len(rows),
        "version": f"{name} {version(name)}",
        "disk_layers": _on_disk(model),
    }
    sys.stdout.write("\n" + json.dumps(done) + "\n")


def _load(task: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    options = task["options"]
    dtype = getattr(torch, options["dtype"])
    more: dict[str, Any] = {}
    if options.get("offload"):
        config = json.loads((Path(task["model"]) / "config.json").read_text())
        weights = sum(file.stat().st_size for file in Path(task["model"]).glob("*.safetensors"))
        layer = weights // config["num_hidden_layers"]
        # one layer more is in memory while it is computed, and a copy of it on its way
        room = max(task["memory_bytes"] - _LIBRARIES_BYTES - 3 * layer, layer)
        more = {"device_map": "auto", "max_memory": {"cpu": room},
                "offload_folder": str(Path(task["work"]) / "offload")}  # fmt: skip
    return AutoModelForCausalLM.from_pretrained(task["model"], dtype=dtype, **more).eval()


def _on_disk(model: Any) -> int:
    """Modules that accelerate keeps on disk."""
    places = getattr(model, "hf_device_map", None) or {}
    return sum(place == "disk" for place in places.values())


def _rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def _spread(rows: list[dict[str, Any]], count: int | None, batch: int) -> list[dict[str, Any]]:
    """Whole batches of neighbours from all over the lengths, for `count` rows; None: all."""
    if count is None or count >= len(rows):
        return rows
    batches = [rows[k : k + batch] for k in range(0, len(rows), batch)]
    wanted = max(1, count // batch)
    return [
        row
        for k in range(wanted)
        for row in batches[int((k + 0.5) * len(batches) / wanted)]
    ]  # fmt: skip


def _generate(model: Any, rows: list[dict[str, Any]], batch: int, tokens: int | None) -> int:
    """Batch by batch; the number of tokens that came out."""
    import torch

    generated = 0
    for first in range(0, len(rows), batch):
        part = rows[first : first + batch]
        longest = max(len(row["prompt_token_ids"]) for row in part)
        pads = [longest - len(row["prompt_token_ids"]) for row in part]
        ids = torch.tensor(
            [[0] * pad + row["prompt_token_ids"] for pad, row in zip(pads, part, strict=True)]
        )
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads])
        new = tokens or max(row["max_new_tokens"] for row in part)
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new,
                                 do_sample=False, pad_token_id=0)  # fmt: skip
        wanted = sum(tokens or row["max_new_tokens"] for row in part)
        generated += wanted if out.shape[1] - longest == new else 0
    return generated


if __name__ == "__main__":
    main(sys.argv[1])
