"""Train the demo model: a Mixtral of a few million weights that writes small stories.

    python -m moebatch.demo.train --corpora DIR --out DIR --minutes 60

DIR holds `tinystories_sample.txt`.  The script trains a tokenizer and then the model, each story
both raw and as the answer to a request made up from its own words.  About 5 % of the stories are
held out; the weights with the best held-out loss are written to --out each time it improves, so
the folder holds a usable model from the first minutes on.  It runs on a CPU and imports only
torch, numpy, tokenizers and safetensors: the model here is written out in full, and its parameter
names are those of the published Mixtral checkpoints.
"""

import argparse
import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

CORPUS = "tinystories_sample.txt"
BOS, EOS, USER, ASSISTANT = range(4)
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
IGNORE = -100

# A system message is dropped: the model never saw one and would only be confused by it.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' + message['content'] + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# Names are exchanged while training: the cheapest way to make few stories go further.
GIRLS = "Lily Mia Sue Lucy Anna Sara Emma Amy Jane Sally Molly Lisa Daisy Ella Mary Jill Kate Mandy"
BOYS = "Tim Tom Ben Max Jack Sam Bob John Billy Joe Jimmy Timmy Tommy Mark Leo Fred Charlie Peter"
NAMES = [GIRLS.split(), BOYS.split()]
ANY_NAME = re.compile(r"\b(" + "|".join(NAMES[0] + NAMES[1]) + r")\b")

WRONG_QUOTES = {"â€œ": '"', "â€™": "'", "â€˜": "'", "â€": '"', "œ": ""}  # noqa: RUF001
PLAIN_SIGNS = str.maketrans("“”’—–", '""\'--')  # noqa: RUF001

ONE_THING = [
    "Tell me a story about {0}.",
    "Write a story about {0}.",
    "Write a short story about {0}.",
    "Can you tell me a story about {0}?",
    "Please write a story about {0} for a small child.",
]
MORE_THINGS = [
    "Write a story about {0} and {1}.",
    "Tell me a story about {0} and {1}.",
    "I want to hear a story about {0} and {1}.",
    "Tell me a short story with {0}, {1} and {2}.",
    "Write a short story with the words {3}, {4} and {5}.",
    "Write a story that uses the words {3} and {4}.",
]


@dataclass(frozen=True)
class Shape:
    """The sizes of the model; about 5.4 million weights, 2.1 million of them used per token."""

    vocab: int = 2048
    hidden: int = 192
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    expert: int = 160
    experts: int = 8
    top_k: int = 2
    context: int = 512
    theta: float = 10000.0
    eps: float = 1e-5


@dataclass(frozen=True)
class Recipe:
    """What is specific to training; strong regularisation, since the text is read many times."""

    seed: int = 7
    held_out: float = 0.05
    chat: float = 0.5
    batch_tokens: int = 4096
    rate: float = 2.5e-3
    warmup_steps: int = 150
    decay: float = 0.4
    dropout: float = 0.15
    balance: float = 0.015
    average: float = 0.995
    check_seconds: float = 75.0


# ---- the model -------------------------------------------------------------------------------


class Spread(torch.autograd.Function):
    """Write each row to its own slot of a larger, zeroed block."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, rows: Tensor, at: Tensor, n: int
    ) -> Tensor:
        ctx.save_for_backward(at)
        return rows.new_zeros(n, rows.shape[1]).index_put_((at,), rows)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: Tensor
    ) -> tuple[Tensor, None, None]:
        (at,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grads[0].index_select(0, at), None, None


class Collect(torch.autograd.Function):
    """Read each row back from its slot.  Slots are distinct, so the gradient need not add up."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, block: Tensor, at: Tensor) -> Tensor:
        ctx.save_for_backward(at)
        ctx.size = len(block)  # type: ignore[attr-defined]
        return block.index_select(0, at)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        (at,) = ctx.saved_tensors  # type: ignore[attr-defined]
        zeros = grads[0].new_zeros(ctx.size, grads[0].shape[1])  # type: ignore[attr-defined]
        return zeros.index_put_((at,), grads[0]), None


class Dropout(nn.Module):
    """Dropout from random bytes; several times faster on a CPU than torch's own."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.drop = round(256 * rate)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.drop:
            return x
        words = torch.randint(-(2**63), 2**63 - 1, (-(-x.numel() // 8),))
        keep = words.view(torch.uint8)[: x.numel()].view_as(x) >= self.drop
        return x * (keep * (256 / (256 - self.drop))).to(x.dtype)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear map without bias, as everywhere in Mixtral."""
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    """Causal attention with rotary positions and fewer key-value heads than query heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = linear(shape.hidden, shape.heads * shape.head_dim)
        self.k_proj = linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.v_proj = linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.o_proj = linear(shape.heads * shape.head_dim, shape.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        split = (batch, length, -1, self.shape.head_dim)
        q, k, v = (
            p(x).view(split).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        # Written out: on a CPU in bf16 this trains over twice as fast as the fused attention.
        later = torch.full((length, length), -math.inf, dtype=q.dtype).triu(1)
        scores = torch.matmul(q * self.shape.head_dim**-0.5, k.mT) + later
        mixed = torch.matmul(scores.softmax(-1, dtype=q.dtype), v)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + half) of a head by its position's angle."""
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)


class SparseMoe(nn.Module):
    """Eight experts, of which each token uses the two that its router likes best."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.top_k = shape.top_k
        self.gate = linear(shape.hidden, shape.experts)
        # All experts in one tensor each: w1 above w3, and w2.  They part when they are saved.
        self.w13 = nn.Parameter(torch.empty(shape.experts, 2 * shape.expert, shape.hidden))
        self.w2 = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.expert))
        self.balance = torch.zeros(())
        self.load = torch.zeros(shape.experts)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        scores = self.gate(rows).float().softmax(-1)
        weights, chosen = scores.topk(self.top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        self._note_balance(scores, chosen, real.flatten())
        # Every expert gets a block of rows as long as the busiest one needs, rounded up so that
        # few sizes occur: the CPU library prepares a kernel for each new size.
        taken = F.one_hot(chosen.flatten(), len(self.w2))
        room = -(-int(taken.sum(0).max()) // 128) * 128
        place = taken.cumsum(0).gather(1, chosen.view(-1, 1)).squeeze(1) - 1
        at = chosen.flatten() * room + place
        blocks: Tensor = Spread.apply(  # type: ignore[no-untyped-call]
            rows.repeat_interleave(self.top_k, 0), at, len(self.w2) * room
        )
        gate, up = torch.bmm(blocks.view(len(self.w2), room, -1), self.w13.mT).chunk(2, -1)
        done = torch.bmm(F.silu(gate) * up, self.w2.mT).flatten(0, 1)
        found: Tensor = Collect.apply(done, at)  # type: ignore[no-untyped-call]
        back = found.view(len(rows), self.top_k, -1)
        mixed: Tensor = (back * weights.unsqueeze(-1).to(back.dtype)).sum(1)
        return mixed.view_as(x)

    def _note_balance(self, scores: Tensor, chosen: Tensor, real: Tensor) -> None:
        """Keep the Switch-style balance term (1 when even), counted over real tokens only."""
        used = F.one_hot(chosen, scores.shape[-1]).sum(1) * real.unsqueeze(-1)
        self.load = used.sum(0)
        mean = (scores * real.unsqueeze(-1)).sum(0) / real.sum()
        self.balance = len(self.load) * (self.load / self.load.sum() * mean).sum()


class Layer(nn.Module):
    """Attention and experts, each behind a norm and added to the stream."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.block_sparse_moe = SparseMoe(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.drop = Dropout(dropout)

    def forward(self, x: Tensor, real: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.drop(self.self_attn(self.input_layernorm(x), cos, sin))
        out: Tensor = self.block_sparse_moe(self.post_attention_layernorm(x), real)
        mixed: Tensor = x + self.drop(out)
        return mixed


class Mixtral(nn.Module):
    """The decoder; its embedding also serves as the output layer."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.drop = Dropout(dropout)
        half = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        angles = torch.outer(torch.arange(shape.context).float(), shape.theta**-half)
        self.register_buffer("angles", angles, persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                # Branch outputs start small, so that the stream keeps its scale through depth.
                shrink = math.sqrt(2 * shape.layers) if ("o_proj" in name or "w2" in name) else 1.0
                scale = 0.03 if "embed" in name else 0.7 / math.sqrt(weight.shape[-1]) / shrink
                nn.init.normal_(weight, std=scale)

    def forward(self, ids: Tensor, real: Tensor) -> Tensor:
        angles = self.get_buffer("angles")[: ids.shape[1]]
        cos, sin = angles.cos(), angles.sin()
        x = self.drop(self.embed_tokens(ids))
        for layer in self.layers:
            x = layer(x, real, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)

    def routers(self) -> list[SparseMoe]:
        """The expert blocks, first layer first."""
        return [m for m in self.modules() if isinstance(m, SparseMoe)]


# ---- text ------------------------------------------------------------------------------------


def read_stories(path: Path) -> list[str]:
    """The stories of the file, in plain ASCII quotes and dashes, without stray spaces."""
    text = path.read_text(encoding="utf-8")
    # Part of the corpus was once decoded with the wrong code page; undo what can be undone.
    for wrong, right in WRONG_QUOTES.items():
        text = text.replace(wrong, right)
    text = text.translate(PLAIN_SIGNS)
    text = re.sub(r"[ \t]*\n\s*", "\n", re.sub(r"[ \t]+", " ", text))
    stories = (story.strip() for story in text.split("<|endoftext|>"))
    return [s for s in stories if len(s) > 100 and s.isascii()]


def train_tokenizer(stories: list[str], size: int) -> Tokenizer:
    """Byte-level BPE whose raw prompts begin with BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    # A thousand requests' worth of their wording, so that it is not spelt letter by letter.
    wording = [t for t in ONE_THING + MORE_THINGS for _ in range(100)]
    tokenizer.train_from_iterator(stories + wording, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    return tokenizer


class Requests:
    """Makes up what a user might have asked to be told a given story."""

    NOUN = re.compile(
        r"\b(?:the|a|an|his|her|their|my)\s+(?:[a-z]+\s+)?([a-z]{3,})"
        r"(?=[.,!?]| (?:was|is|and|in|on|to|that|who|said|had|with|named|called)\b)"
    )

    def __init__(self, stories: list[str], rng: np.random.Generator) -> None:
        text = "\n".join(stories)
        words = Counter(re.findall(r"[a-z]+", text))
        hits = Counter(self.NOUN.findall(text))
        self.nouns = {w for w, n in hits.items() if n >= 4 and n > 0.25 * words[w]}
        self.nouns -= {"time", "day", "one", "end", "way", "lot", "bit", "rest", "while", "other"}
        self.seen_in = Counter(w for s in stories for w in set(re.findall(r"[a-z]+", s)))
        self.stories, self.rng = len(stories), rng

    def _things(self, story: str) -> list[str]:
        """The story's nouns, the most telling first: frequent here, rare elsewhere."""
        counts = Counter(w for w in re.findall(r"[a-z]+", story) if w in self.nouns)
        rarity = {w: math.log(self.stories / (1 + self.seen_in[w])) for w in counts}
        return sorted(counts, key=lambda w: -counts[w] * rarity[w])[:6]

    def _phrase(self, noun: str, story: str) -> str:
        """The noun as the story introduces it ("a red ball"), or with a plain article."""
        found = re.search(rf"\b(an? (?:(?!lot|few|bit)[a-z]+ )?{noun})\b", story)
        if found:
            return found[1]
        if noun.endswith("s"):
            return noun
        return ("an " if noun[0] in "aeiou" else "a ") + noun

    def make(self, story: str) -> tuple[str, str]:
        """A request and the answer to it."""
        draw = self.rng.random()
        first, _, rest = story.partition(". ")
        if draw < 0.1 and len(first) < 150 and rest:
            return f"Continue this story: {first}.", rest
        things = self._things(story)
        # Weighted to the front of the list: the story should be about what was asked for.
        things = sorted(things, key=lambda w: things.index(w) + self.rng.exponential(1.5))
        phrases = [self._phrase(w, story) for w in things]
        names = ANY_NAME.findall(story)
        if names and self.rng.random() < 0.3:
            phrases.insert(0, names[0])
            things.insert(0, names[0])
        if len(things) < 3:
            return "Tell me a story.", story
        choices = ONE_THING if draw < 0.4 else MORE_THINGS
        form = choices[self.rng.integers(len(choices))]
        return form.format(*phrases[:3], *things[:3]), story


def swap_names(story: str, rng: np.random.Generator) -> str:
    """The same story about other children: each name for one of its kind, never two for one."""
    changes: dict[str, str] = {}
    for kind in NAMES:
        changes |= dict(zip(kind, rng.permutation(kind).tolist(), strict=True))
    return ANY_NAME.sub(lambda found: changes[found[0]], story)


@dataclass(frozen=True)
class Sample:
    """Token ids, and how many of them are given rather than learnt."""

    ids: list[int]
    given: int


def raw_samples(stories: list[str], tokenizer: Tokenizer, context: int) -> list[Sample]:
    """Each story between BOS and EOS; a long one only as far as the context reaches."""
    coded = tokenizer.encode_batch(stories)
    return [Sample([*c.ids, EOS][: context + 1], 1) for c in coded]


def chat_samples(
    stories: list[str], requests: Requests, tokenizer: Tokenizer, context: int
) -> list[Sample]:
    """Each story as the answer to a request, in the form of the chat template."""
    pairs = [requests.make(s) for s in stories]
    asked = tokenizer.encode_batch([a for a, _ in pairs], add_special_tokens=False)
    told = tokenizer.encode_batch([b for _, b in pairs], add_special_tokens=False)
    samples = []
    for a, b in zip(asked, told, strict=True):
        head = [BOS, USER, *a.ids, ASSISTANT]
        samples.append(Sample([*head, *b.ids, EOS][: context + 1], len(head)))
    return samples


def batches(
    samples: list[Sample], tokens: int, rng: np.random.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets; samples of like length together, the groups in random order."""
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].ids) + rng.uniform(0, 8))
    groups: list[list[Sample]] = [[]]
    for i in order:
        width = -(-(len(samples[i].ids) - 1) // 32) * 32
        if (len(groups[-1]) + 1) * width > tokens:
            groups.append([])
        groups[-1].append(samples[i])
    for g in rng.permutation(len(groups)):
        longest = max(len(s.ids) for s in groups[g]) - 1
        width = -(-longest // 32) * 32
        ids = torch.full((len(groups[g]), width), EOS)
        targets = torch.full((len(groups[g]), width), IGNORE)
        for row, s in enumerate(groups[g]):
            ids[row, : len(s.ids) - 1] = torch.tensor(s.ids[:-1])
            targets[row, s.given - 1 : len(s.ids) - 1] = torch.tensor(s.ids[s.given :])
        yield ids, targets


# ---- training --------------------------------------------------------------------------------


@torch.no_grad()
def held_out_loss(model: Mixtral, samples: list[Sample]) -> tuple[float, int, list[Tensor]]:
    """Total loss in nats, the tokens it is summed over, and each layer's expert load."""
    model.eval()
    total, count = 0.0, 0
    loads = [torch.zeros(len(r.w2)) for r in model.routers()]
    for ids, targets in batches(samples, 8192, np.random.default_rng(0)):
        logits = model(ids, targets != IGNORE)
        total += F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
        ).item()
        count += int((targets != IGNORE).sum())
        loads = [a + r.load for a, r in zip(loads, model.routers(), strict=True)]
    return total, count, [a / a.sum() for a in loads]


def rounded(model: Mixtral) -> dict[str, Tensor]:
    """The weights as they will be stored."""
    return {n: w.detach().to(torch.bfloat16) for n, w in model.named_parameters()}


def published(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights, each expert on its own, under the names of Mixtral checkpoints."""
    named = {}
    for name, w in weights.items():
        moe, _, kind = name.rpartition(".")
        if kind not in ("w13", "w2"):
            named[name] = w
            continue
        for e, expert in enumerate(w):
            parts = dict(zip(("w1", "w3"), expert.chunk(2), strict=True)) if kind == "w13" else {}
            for part, tensor in (parts or {"w2": expert}).items():
                named[f"{moe}.experts.{e}.{part}.weight"] = tensor.clone()
    return named


def write_model(out: Path, shape: Shape, model: Mixtral, report: dict[str, object]) -> None:
    """The weights, and how they came about; each file appears whole or not at all."""
    weights = {f"model.{n}": w for n, w in published(rounded(model)).items()}
    save_file(weights, out / "model.partial", metadata={"format": "pt"})
    (out / "model.partial").rename(out / "model.safetensors")
    report["parameters"] = sum(w.numel() for w in weights.values())
    report["bytes"] = (out / "model.safetensors").stat().st_size
    report["shape"] = asdict(shape)
    write_json(out / "training.json", report)


def write_json(path: Path, content: dict[str, object]) -> None:
    """Indented, with lists of numbers kept on one line."""
    text = json.dumps(content, indent=2)
    flat = re.sub(r"\[[^][{}]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text)
    path.write_text(flat + "\n", encoding="utf-8")


def write_settings(out: Path, shape: Shape, tokenizer: Tokenizer) -> None:
    """Everything a reader of the published Mixtral layout expects beside the weights."""
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.expert,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_local_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.theta,
        "rms_norm_eps": shape.eps,
        "hidden_act": "silu",
        "sliding_window": None,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "bfloat16",
    }
    write_json(out / "config.json", config)
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    extra = {"clean_up_tokenization_spaces": False, "model_max_length": shape.context}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
    write_json(out / "tokenizer_config.json", {**tokens, **extra, **kind})
    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "max_new_tokens": 200}
    ids = {"bos_token_id": BOS, "eos_token_id": [EOS], "pad_token_id": EOS}
    write_json(out / "generation_config.json", {**ids, **sampling})


class Training:
    """One run: the model, its running average, and the best average so far."""

    def __init__(self, shape: Shape, recipe: Recipe, corpus: Path, out: Path) -> None:
        torch.manual_seed(recipe.seed)
        self.shape, self.recipe, self.out = shape, recipe, out
        self.rng = np.random.default_rng(recipe.seed)
        stories = read_stories(corpus)
        order = np.random.default_rng(recipe.seed).permutation(len(stories))
        cut = int(len(stories) * recipe.held_out)
        self.stories = [stories[i] for i in order[cut:]]
        held = [stories[i] for i in order[:cut]]
        self.tokenizer = train_tokenizer(self.stories, shape.vocab)
        self.requests = Requests(self.stories, self.rng)
        self.held = raw_samples(held, self.tokenizer, shape.context)
        self.held_bytes = sum(len(self.tokenizer.decode(s.ids).encode()) for s in self.held)
        self.model = Mixtral(shape, recipe.dropout)
        self.average = Mixtral(shape)
        self.average.load_state_dict(self.model.state_dict())
        self.optimiser = torch.optim.AdamW(self._groups(), betas=(0.9, 0.98), fused=True)
        self.steps = self.tokens = 0
        self.best = math.inf

    def _groups(self) -> list[dict[str, object]]:
        """Norms, routers and the embedding do not decay."""
        named = list(self.model.named_parameters())
        spared = ("norm", "gate", "embed")
        free = [w for n, w in named if any(part in n for part in spared)]
        rest = [w for n, w in named if not any(part in n for part in spared)]
        decay = self.recipe.decay
        return [{"params": rest, "weight_decay": decay}, {"params": free, "weight_decay": 0.0}]

    def epoch(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every story once, raw or as an answer, half of them with other names."""
        rng, tokenizer, context = self.rng, self.tokenizer, self.shape.context
        stories = [swap_names(s, rng) if rng.random() < 0.5 else s for s in self.stories]
        chat = rng.random(len(stories)) < self.recipe.chat
        raw = [s for s, c in zip(stories, chat, strict=True) if not c]
        asked = [s for s, c in zip(stories, chat, strict=True) if c]
        samples = raw_samples(raw, tokenizer, context)
        samples += chat_samples(asked, self.requests, tokenizer, context)
        return batches(samples, self.recipe.batch_tokens, rng)

    def step(self, ids: Tensor, targets: Tensor, progress: float) -> float:
        """One update; the rate rises quickly, then falls with the time used."""
        rate = self.recipe.rate * min(1.0, (self.steps + 1) / self.recipe.warmup_steps)
        for group in self.optimiser.param_groups:
            group["lr"] = rate * max(0.02, (1 + math.cos(math.pi * progress)) / 2)
        self.model.train()
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(ids, targets != IGNORE)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
        balance = torch.stack([r.balance for r in self.model.routers()]).mean()
        (loss + self.recipe.balance * balance).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad()
        keep = min(self.recipe.average, self.steps / (self.steps + 10))
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.average.parameters()), list(self.model.parameters()), 1 - keep
            )
        self.steps += 1
        self.tokens += int((targets != IGNORE).sum())
        return loss.item()

    def check(self, minutes: float, recent: float) -> None:
        """Measure the average as it would be stored; write it where it is the best so far."""
        stored = Mixtral(self.shape)
        stored.load_state_dict({n: w.float() for n, w in rounded(self.average).items()})
        total, count, loads = held_out_loss(stored, self.held)
        print(
            f"{minutes:6.1f} min  step {self.steps:6}  tokens {self.tokens / 1e6:6.2f} M  "
            f"train {recent:.3f}  held-out {total / count:.4f}  "
            f"bits/byte {total / math.log(2) / self.held_bytes:.4f}  "
            f"load {min(a.min().item() for a in loads):.3f}-{max(a.max().item() for a in loads):.3f}",
            flush=True,
        )
        if total / count < self.best:
            self.best = total / count
            report = self.report(total, count, loads)
            report["minutes"] = round(minutes, 1)
            write_model(self.out, self.shape, stored, report)

    def report(self, total: float, count: int, loads: list[Tensor]) -> dict[str, object]:
        """What `training.json` says about the weights beside it."""
        return {
            "data": {
                "file": CORPUS,
                "origin": "TinyStories",
                "licence": "CDLA-Sharing-1.0",
                "training_stories": len(self.stories),
                "held_out_stories": len(self.held),
            },
            "held_out": {
                "perplexity_per_token": round(math.exp(total / count), 3),
                "bits_per_byte": round(total / math.log(2) / self.held_bytes, 4),
                "tokens": count,
                "bytes": self.held_bytes,
                "bytes_per_token": round(self.held_bytes / count, 3),
            },
            "expert_load_per_layer": [[round(x, 3) for x in a.tolist()] for a in loads],
            "tokens_learnt_from": self.tokens,
            "steps": self.steps,
            "recipe": asdict(self.recipe),
        }

    def run(self, minutes: float) -> None:
        """Train for so many minutes of wall clock."""
        began = time.monotonic()
        checked, recent, done = began, 8.0, False
        while not done:
            for ids, targets in self.epoch():
                now = time.monotonic()
                recent += 0.02 * (self.step(ids, targets, (now - began) / 60 / minutes) - recent)
                done = now - began > 60 * minutes
                if done or now - checked > self.recipe.check_seconds:
                    checked = now
                    self.check((now - began) / 60, recent)
                if done:
                    break


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpora", type=Path, required=True, help=f"folder with {CORPUS}")
    parser.add_argument("--out", type=Path, required=True, help="where the model goes")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    given.out.mkdir(parents=True, exist_ok=True)
    training = Training(Shape(), Recipe(), given.corpora / CORPUS, given.out)
    write_settings(given.out, training.shape, training.tokenizer)
    training.run(given.minutes)


if __name__ == "__main__":
    main()
