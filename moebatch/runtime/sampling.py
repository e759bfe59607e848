"""Chooses the next token of many rows at once, so that no row can tell who else is in the batch.

Steps, in the order of vLLM and Transformers: log-probabilities of the raw logits; then logit_bias,
forbidden tokens, penalties, temperature, min_p, top_k, top_p, and one draw. The noise is a pure
function of (seed, row key, choice, position), and every sum that rounds runs over one row alone,
so neither the batch nor its order changes a token, bit for bit.

`sample_plain` says what is meant; `sample` does the same without sorting the vocabulary.
Shapes: S rows, V vocabulary, C tokens left after min_p and top_k, B tokens that top_p looks at.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moebatch.data.requests import SamplingParams, TokenLogprob

Floats = NDArray[np.float64]
Logits = NDArray[np.float32]
Ids = NDArray[np.int64]
Words = NDArray[np.uint64]

_MASK64 = (1 << 64) - 1
# Philox4x64-10: multipliers and key increments of Salmon et al., "Parallel random numbers", 2011.
_PHILOX_FACTORS = (np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157))
_PHILOX_STEPS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B))
# Weights are summed in runs of this many before the draw, and chunks of _MAX_RUN logits are reduced
# to their maxima before a top-k: both only make a pass over V cheap.
_SUM_RUN = 256
_MAX_RUN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingState:
    """What one sequence brings to the choice of its next token.

    `row_key` is a 64-bit hash of the row's id, `position` the number of tokens generated so far.
    `forbidden_token_ids` cannot be chosen now (EOS and stop ids before min_tokens). Prompt and
    generated ids matter to penalties only; arrays (numpy, array("q")) are read without a copy.
    """

    params: SamplingParams
    row_key: int
    choice: int = 0
    position: int = 0
    prompt_token_ids: Sequence[int] = ()
    generated_token_ids: Sequence[int] = ()
    forbidden_token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """A chosen token. If not `finite`, the logits were unusable and token_id means nothing."""

    token_id: int
    logprob: TokenLogprob | None = None
    finite: bool = True


_NOT_FINITE = SampledToken(token_id=0, finite=False)


def row_key(row_id: str) -> int:
    """The 64-bit key of a row: the same in every run, shard and process."""
    content = row_id.encode("utf-8", "surrogatepass")  # JSON escapes can write lone surrogates
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


# --- the plain form: one row at a time, everything sorted ---


def sample_plain(logits: Tensor, rows: Sequence[SamplingState]) -> list[SampledToken]:
    """`sample`, written to be checked by eye."""
    table = logits.detach().cpu().numpy()
    noise = uniforms(rows)
    with np.errstate(over="ignore"):
        return [_sample_row_plain(*args) for args in zip(table, rows, noise, strict=True)]


def _sample_row_plain(raw: Logits, state: SamplingState, uniform: float) -> SampledToken:
    x = edited_plain(raw, state)
    if not np.isfinite(raw).all() or not np.isfinite(x.max()):
        return _NOT_FINITE
    if state.params.temperature == 0:
        token = int(x.argmax())
    else:
        ids, weights = kept_plain(x, state.params)
        mass = np.cumsum(weights)
        token = int(ids[np.flatnonzero(mass > uniform * mass[-1])[0]])
    return SampledToken(token_id=token, logprob=_logprob_plain(raw, token, state.params.logprobs))


def _logprob_plain(raw: Logits, token: int, count: int | None) -> TokenLogprob | None:
    if count is None:
        return None
    x = raw.astype(np.float64)
    logprobs = x - x.max() - np.log(np.exp(x - x.max()).sum())
    top = np.argsort(-x, kind="stable")[:count]
    pairs = tuple((int(i), float(logprobs[i])) for i in top)
    return TokenLogprob(token_id=token, logprob=float(logprobs[token]), top=pairs)


def edited_plain(raw: Logits, state: SamplingState) -> Logits:
    """Logits [V] after bias, forbidden tokens and penalties; ids beyond the vocabulary are void."""
    x, params = raw.copy(), state.params
    ids = range(len(x))
    for i, bias in dict(params.logit_bias).items():
        if i in ids:
            x[i] = float(x[i]) + bias
    for i in state.forbidden_token_ids:
        if i in ids:
            x[i] = -math.inf
    for i in {*state.prompt_token_ids, *state.generated_token_ids}:
        if i in ids:
            value, penalty = float(x[i]), params.repetition_penalty
            x[i] = value / penalty if value > 0 else value * penalty
    for i, count in Counter(state.generated_token_ids).items():
        if i in ids:
            x[i] = float(x[i]) - (params.presence_penalty + params.frequency_penalty * count)
    return x


def kept_plain(x: Logits, params: SamplingParams) -> tuple[Ids, Floats]:
    """Ids that min_p, top_k and top_p leave of logits x [V], ascending, and their weights.

    Weights are probabilities up to a factor: the likeliest token has 1. Tokens tied with the k-th
    all stay, as in Transformers; among equals top_p takes the lowest ids.
    """
    weights = _weights(x, peak=x.max(), temperature=params.temperature)
    keep = weights >= min(params.min_p, 1.0)
    if 0 < params.top_k < len(x):
        keep &= x >= np.sort(x)[-params.top_k]
    ids = np.flatnonzero(keep)
    if params.top_p < 1:
        ranked = ids[np.argsort(-x[ids], kind="stable")]
        mass = np.cumsum(weights[ranked])
        # The first token always stays; the next ones while those before it do not reach top_p.
        count = 1 + np.count_nonzero(mass[:-1] < params.top_p * mass[-1])
        ids = np.sort(ranked[:count])
    return ids, weights[ids]


# --- the fast form ---


def sample(logits: Tensor, rows: Sequence[SamplingState]) -> list[SampledToken]:
    """The next token of each row of logits [S, V] float32, which are not changed.

    A row whose logits hold a NaN or an infinity, or whose every token is forbidden, comes back with
    `finite` False; the others do not notice.
    """
    table = logits.detach().cpu().numpy()
    best, lowest = table.argmax(axis=1), table.min(axis=1)  # both find a NaN, if there is one
    noise = uniforms(rows) if any(row.params.temperature for row in rows) else np.zeros(len(rows))
    with np.errstate(over="ignore"):
        return [
            _sample_row(table[s], row, best=int(best[s]), uniform=float(noise[s]))
            if math.isfinite(lowest[s]) and math.isfinite(table[s, best[s]])
            else _NOT_FINITE
            for s, row in enumerate(rows)
        ]


def _sample_row(raw: Logits, state: SamplingState, *, best: int, uniform: float) -> SampledToken:
    """Token of one row of finite logits [V]; `best` is their argmax."""
    x = raw
    if _has_edits(state):
        x = edited(raw, state)
        best = int(x.argmax())
        if not math.isfinite(x[best]):
            return _NOT_FINITE
    params, token = state.params, best
    if params.temperature:
        ids, weights = _kept(x, params, peak=x[best])
        drawn = _draw(weights, uniform)
        token = drawn if ids is None else int(ids[drawn])
    return SampledToken(token_id=token, logprob=_logprob(raw, token, params.logprobs))


def _has_edits(state: SamplingState) -> bool:
    params = state.params
    return bool(
        params.logit_bias
        or len(state.forbidden_token_ids)
        or params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
    )


def edited(raw: Logits, state: SamplingState) -> Logits:
    """`edited_plain` without loops over tokens."""
    x, params = raw.copy(), state.params
    bias = {i: b for i, b in params.logit_bias if 0 <= i < len(x)}
    x[list(bias)] += np.array(list(bias.values()))
    x[_inside(state.forbidden_token_ids, len(x))] = -math.inf
    generated = _inside(state.generated_token_ids, len(x))
    if params.repetition_penalty != 1:
        seen = np.concatenate([_inside(state.prompt_token_ids, len(x)), generated])
        # An id that occurs twice is read twice before it is written: the penalty counts once.
        value, penalty = x[seen].astype(np.float64), params.repetition_penalty
        x[seen] = np.where(value > 0, value / penalty, value * penalty)
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = np.unique(generated, return_counts=True)
        x[ids] -= params.presence_penalty + params.frequency_penalty * counts
    return x


def _inside(token_ids: Sequence[int], vocab_size: int) -> Ids:
    ids = np.asarray(token_ids, dtype=np.int64)
    return ids[(ids >= 0) & (ids < vocab_size)]


def _weights(x: Logits, *, peak: np.float32, temperature: float) -> Floats:
    """Unnormalised probabilities of logits x, 1 at the peak; float64, each from its own logit."""
    weights = np.subtract(x, peak, dtype=np.float64)
    if temperature != 1:
        weights /= temperature
    return np.exp(weights, out=weights)


def _kept(x: Logits, params: SamplingParams, *, peak: np.float32) -> tuple[Ids | None, Floats]:
    """`kept_plain`; ids None says that the whole vocabulary is kept."""
    floor = _floor(x, params, peak=float(peak))
    ids = np.flatnonzero(x >= np.float32(floor)) if floor > -math.inf else None
    values = x if ids is None else x[ids]
    weights = _weights(values, peak=peak, temperature=params.temperature)
    if ids is not None and params.min_p > 0:
        likely = weights >= min(params.min_p, 1.0)
        ids, values, weights = ids[likely], values[likely], weights[likely]
    if params.top_p >= 1:
        return ids, weights
    kept = _nucleus(values, weights, params=params, peak=peak)
    return kept if ids is None else ids[kept], weights[kept]


def _floor(x: Logits, params: SamplingParams, *, peak: float) -> float:
    """A logit below which min_p and top_k keep nothing: exact for top_k, a little low for min_p."""
    floor = -math.inf
    if params.min_p > 0:
        depth = params.temperature * math.log(min(params.min_p, 1.0))
        floor = peak + depth - 1e-6 * (1 + abs(peak) - depth)  # the slack covers float32 rounding
    if 0 < params.top_k < len(x):
        floor = max(floor, _kth_largest(x, params.top_k))
    return floor


def _kth_largest(x: Logits, k: int) -> float:
    num_chunks = len(x) // _MAX_RUN
    if num_chunks > 2 * k:
        # k chunks have a maximum this large, so k logits have; few others do.
        maxima = x[: num_chunks * _MAX_RUN].reshape(num_chunks, _MAX_RUN).max(axis=1)
        x = x[x >= np.partition(maxima, -k)[-k]]
    return float(np.partition(x, -k)[-k])


def _nucleus(values: Logits, weights: Floats, *, params: SamplingParams, peak: np.float32) -> Ids:
    """Indices, ascending, of the tokens that top_p keeps of logits `values` [C] with `weights` [C].

    A kept token and all smaller ones together weigh more than 1 - top_p of the total. So the token
    alone weighs more than that over C: only such tokens [B] need sorting.
    """
    total = float(weights.sum())
    least = (1 - params.top_p) * total / len(weights)
    large: Ids = np.flatnonzero(weights > least * (1 - 1e-9))  # room for rounding in the total
    large_values = values[large]
    ranked = np.sort(large_values)[::-1]
    mass = np.cumsum(_weights(ranked, peak=peak, temperature=params.temperature))
    count = 1 + int(np.searchsorted(mass[:-1], params.top_p * total, side="left"))
    keep = large_values > ranked[count - 1]
    ties = np.flatnonzero(large_values == ranked[count - 1])
    keep[ties[: count - np.count_nonzero(keep)]] = True
    kept: Ids = large[keep]
    return kept


def _draw(weights: Floats, uniform: float) -> int:
    """Index of the first weight at which the running sum exceeds uniform * total.

    Sums of runs locate the run first: a running sum over a vocabulary costs more than its exp.
    """
    ends = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _SUM_RUN)))
    target = uniform * ends[-1]
    run = int(np.searchsorted(ends, target, side="right"))
    first = run * _SUM_RUN
    inside = np.cumsum(weights[first : first + _SUM_RUN])
    rest = target - (ends[run - 1] if run else 0.0)
    # The two sums of a run may round differently: never step past its last positive weight.
    last = np.searchsorted(inside, inside[-1], side="left")
    return first + int(min(np.searchsorted(inside, rest, side="right"), last))


def _logprob(raw: Logits, token: int, count: int | None) -> TokenLogprob | None:
    if count is None:
        return None
    peak = raw.max()
    weights = _weights(raw, peak=peak, temperature=1.0)
    norm = float(peak) + math.log(float(weights.sum()))
    pairs = tuple((int(i), float(raw[i]) - norm) for i in _largest(raw, count))
    return TokenLogprob(token_id=token, logprob=float(raw[token]) - norm, top=pairs)


def _largest(x: Logits, count: int) -> Ids:
    """Ids of the largest logits, largest first, equals by id."""
    if count == 0:
        return np.empty(0, dtype=np.int64)
    ids: Ids = np.flatnonzero(x >= np.float32(_kth_largest(x, min(count, len(x)))))
    largest: Ids = ids[np.argsort(-x[ids], kind="stable")[:count]]
    return largest


# --- the noise ---


def uniforms(rows: Sequence[SamplingState]) -> Floats:
    """One number in [0, 1) per row, from (seed, row_key, choice, position) and nothing else."""
    facts = [(row.position, row.choice, row.params.seed, row.row_key) for row in rows]
    words = np.array([[fact & _MASK64 for fact in of_row] for of_row in facts], dtype=np.uint64)
    position, choice, seed, key = words.reshape(-1, 4).T
    noise = philox(counter=(position, choice), key=(seed, key))
    return np.ldexp((noise >> np.uint64(11)).astype(np.float64), -53)


def philox(*, counter: tuple[Words, Words], key: tuple[Words, Words]) -> Words:
    """First output word of Philox4x64-10 at counter (c0, c1, 0, 0), for many counters and keys."""
    c0, c1 = counter
    c2 = c3 = np.zeros_like(c0)
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, _PHILOX_FACTORS[0])
        high1, low1 = _multiply(c2, _PHILOX_FACTORS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _PHILOX_STEPS[0], k1 + _PHILOX_STEPS[1]
    return c0


def _multiply(a: Words, b: np.uint64) -> tuple[Words, Words]:
    """High and low 64 bits of a * b, by 32-bit halves."""
    low32, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    a_low, a_high, b_low, b_high = a & low32, a >> shift, b & low32, b >> shift
    middle = a_high * b_low + (a_low * b_low >> shift)
    cross = a_low * b_high + (middle & low32)
    return a_high * b_high + (middle >> shift) + (cross >> shift), a * b
