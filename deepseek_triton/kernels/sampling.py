"""From logits to one token a row, on the device, by the rules of runner/sampler.py.

A first kernel reads the logits in parallel chunks and leaves a summary of each; it is all that
greedy rows need. A second one, a program a row, finishes. For top-k and top-p it searches the key
(the logit's bits, ordered as integers) that the last kept token has, by splitting the range of keys
in four until one token or one value is left: no sort, no atomics, and the result is exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepseek_triton.kernels.launch import await_inputs, dependent_launch
from deepseek_triton.request import SamplingParams

IN_PROMPT = 1 << 30  # in token_counts: the token occurs in the prompt
_CHUNK = 2048
_SUMMARY = 5  # maximum, minimum, Σ exp(logit − maximum), adjusted maximum, its id's bits
_COLUMNS = 7  # of a row of parameters
_LOWEST_KEY = tl.constexpr(-(2**31))


def sampling_row(params: SamplingParams, uniform: float) -> tuple[float, ...]:
    """Return a row for `sample`; `uniform` is the draw in [0, 1)."""
    temperature = 0.0 if params.greedy else max(params.temperature, 1e-6)
    return (
        temperature,
        float(params.top_k),
        params.top_p,
        uniform,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor | None = None,
    *,
    token_counts: torch.Tensor | None = None,
    banned: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [2, B] int32: the token chosen from each row of logits [B, V], its log prob's bits.

    logits may be of any float dtype, rows contiguous; they are not modified. `rows` [B, 7] float32
    holds a `sampling_row` each; None: all greedy. `token_counts` [B, V] int32 counts each token in
    the output, plus IN_PROMPT; needed only for penalties. `banned` [B, n] int32 holds ids that
    cannot be drawn, −1 = none. The log prob is that of the unmodified logits. A row that holds NaN
    or +Inf, or zeros alone, or has no token left, gets −1 and NaN.
    """
    count, vocab = logits.shape
    device = logits.device
    chunks = triton.cdiv(vocab, _CHUNK)
    summary = torch.empty(count, _SUMMARY, chunks, dtype=torch.float32, device=device)
    chosen = torch.empty(2, count, dtype=torch.int32, device=device)
    adjusted = logits
    if token_counts is not None or banned is not None:
        adjusted = torch.empty(count, vocab, dtype=torch.float32, device=device)
    pdl = dependent_launch(logits)
    _summarise[(chunks, count)](
        logits, adjusted, rows, token_counts, banned, summary, vocab, logits.stride(0), chunks,
        0 if banned is None else banned.shape[1], COLUMNS=_COLUMNS, CHUNK=_CHUNK, **pdl,
    )  # fmt: skip
    _finish[(count,)](
        logits, adjusted, rows, summary, chosen, vocab, logits.stride(0), adjusted.stride(0),
        count, chunks, BLOCK_C=triton.next_power_of_2(chunks), COLUMNS=_COLUMNS,
        BLOCK=min(4096, max(16, triton.next_power_of_2(vocab))),
        num_warps=1 if rows is None else 16, **pdl,
    )  # fmt: skip
    return chosen


@triton.jit
def _adjust(
    logits, ids, valid, row, rows_ptr, counts_ptr, banned_ptr, vocab, bans, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Apply penalties and bans to logits of `ids`."""
    if counts_ptr is not None:
        repetition = tl.load(rows_ptr + row * COLUMNS + 4)
        presence = tl.load(rows_ptr + row * COLUMNS + 5)
        frequency = tl.load(rows_ptr + row * COLUMNS + 6)
        seen = tl.load(counts_ptr + row * vocab + ids, mask=valid, other=0)
        count = (seen & 0x3FFFFFFF).to(tl.float32)
        repeated = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
        logits = tl.where(seen != 0, repeated, logits)
        logits = tl.where(count > 0, logits - (presence + frequency * count), logits)
    if banned_ptr is not None:
        for i in range(bans):
            logits = tl.where(ids == tl.load(banned_ptr + row * bans + i), float("-inf"), logits)
    return logits


@triton.jit(do_not_specialize=["bans"])
def _summarise(
    logits_ptr, adjusted_ptr, rows_ptr, counts_ptr, banned_ptr, summary_ptr,
    vocab, stride, chunks, bans,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Summary of one chunk of one row; NaN counts as +Inf."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    valid = ids < vocab
    await_inputs(PDL)
    logits = tl.load(logits_ptr + row * stride + ids, mask=valid, other=float("-inf"))
    logits = logits.to(tl.float32)
    logits = tl.where(logits != logits, float("inf"), logits)
    peak = tl.max(logits, axis=0)
    lowest = tl.min(tl.where(valid, logits, float("inf")), axis=0)
    finite = tl.where(peak > float("-inf"), peak, 0.0)
    total = tl.sum(tl.exp(logits - finite), axis=0)
    best = peak
    if counts_ptr is not None or banned_ptr is not None:
        logits = _adjust(
            logits, ids, valid, row, rows_ptr, counts_ptr, banned_ptr, vocab, bans, COLUMNS
        )
        tl.store(adjusted_ptr + row * vocab + ids, logits, mask=valid)
        best = tl.max(logits, axis=0)
    best_id = tl.min(tl.where((logits == best) & valid, ids, vocab), axis=0)
    at = summary_ptr + row * (5 * chunks) + chunk
    tl.store(at, peak)
    tl.store(at + chunks, lowest)
    tl.store(at + 2 * chunks, total)
    tl.store(at + 3 * chunks, best)
    tl.store(at + 4 * chunks, best_id.to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["count"])
def _finish(
    logits_ptr, adjusted_ptr, rows_ptr, summary_ptr, chosen_ptr,
    vocab, stride, adjusted_stride, count, chunks,
    BLOCK_C: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: join the summaries, draw where the row asks for it, store token and log prob."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    mask = c < chunks
    await_inputs(PDL)
    at = summary_ptr + row * (5 * chunks) + c
    peaks = tl.load(at, mask=mask, other=float("-inf"))
    lowest = tl.min(tl.load(at + chunks, mask=mask, other=float("inf")), axis=0)
    totals = tl.load(at + 2 * chunks, mask=mask, other=0)
    bests = tl.load(at + 3 * chunks, mask=mask, other=float("-inf"))
    ids = tl.load(at + 4 * chunks, mask=mask, other=0).to(tl.int32, bitcast=True)
    peak = tl.max(peaks, axis=0)
    best = tl.max(bests, axis=0)
    token = tl.min(tl.where((bests == best) & mask, ids, vocab), axis=0)
    usable = (tl.abs(peak) < float("inf")) & (tl.abs(best) < float("inf"))
    usable = usable & ((peak != 0) | (lowest != 0))
    token = tl.where(usable, token, -1)
    if rows_ptr is not None:
        params = rows_ptr + row * COLUMNS
        temperature = tl.load(params)
        if usable & (temperature > 0):
            token = _draw(
                adjusted_ptr + row * adjusted_stride, vocab, best, temperature,
                tl.load(params + 1).to(tl.int32), tl.load(params + 2), tl.load(params + 3), BLOCK,
            )  # fmt: skip
    total = tl.sum(tl.where(peaks > float("-inf"), totals * tl.exp(peaks - peak), 0.0), axis=0)
    raw = tl.load(logits_ptr + row * stride + tl.maximum(token, 0)).to(tl.float32)
    log_prob = tl.minimum(raw - peak - tl.log(total), 0.0)
    log_prob = tl.where(token >= 0, log_prob, float("nan"))
    tl.store(chosen_ptr + row, token)
    tl.store(chosen_ptr + count + row, log_prob.to(tl.int32, bitcast=True))


@triton.jit
def _load(row_ptr, ids, vocab):
    """Return logits and keys of `ids`; keys order as logits do. Beyond the row: the lowest."""
    logits = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    return logits, _key(logits)


@triton.jit
def _key(logits):
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # −0 and 0 are equal
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _kept(keys, ids, low, high, last_id):
    """Whether a token is above the edge, or on it and early enough."""
    return (keys > high) | ((keys >= low) & (ids <= last_id))


@triton.jit
def _draw(
    row_ptr, vocab, peak, temperature, top_k, top_p, uniform,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the token that `uniform` picks among those that top-k and top-p keep."""
    low = tl.full([], _LOWEST_KEY, tl.int32)
    high = low
    last_id = vocab
    if (top_k > 0) & (top_k < vocab):
        low, high, last_id = _edge(
            row_ptr, vocab, peak, temperature, low, high, last_id, top_k.to(tl.float32), True, BLOCK
        )
    p_low = tl.full([], _LOWEST_KEY, tl.int32)
    p_high = p_low
    p_last_id = vocab
    if top_p < 1.0:
        p_low, p_high, p_last_id = _edge(
            row_ptr, vocab, peak, temperature, low, high, last_id, top_p, False, BLOCK
        )
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits, keys = _load(row_ptr, ids, vocab)
        kept = _kept(keys, ids, low, high, last_id) & _kept(keys, ids, p_low, p_high, p_last_id)
        total += tl.where(kept, _weight(logits, peak, temperature), 0.0)
    target = tl.sum(total, axis=0) * uniform
    token = -1
    last = -1  # the last token of any weight, should rounding hide the one that is looked for
    before = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits, keys = _load(row_ptr, ids, vocab)
        kept = _kept(keys, ids, low, high, last_id) & _kept(keys, ids, p_low, p_high, p_last_id)
        weights = tl.where(kept, _weight(logits, peak, temperature), 0.0).to(tl.float64)
        last = tl.maximum(last, tl.max(tl.where(weights > 0, ids, -1), axis=0))
        here = tl.sum(weights, axis=0)
        if (token < 0) & (before + here > target):
            reached = before + tl.cumsum(weights, axis=0) > target
            first = tl.min(tl.where(reached & (weights > 0), ids, vocab), axis=0)
            token = tl.where(first < vocab, first, -1)
        before += here
    return tl.where(token < 0, last, token)


@triton.jit
def _weight(logits, peak, temperature):
    return tl.exp(tl.div_rn(logits - peak, temperature))


@triton.jit
def _measure(
    row_ptr, vocab, peak, temperature, low, high, last_id, first, second, third,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the measure (number or weight) of kept tokens with keys ≥ each of three keys."""
    one = tl.zeros([BLOCK], tl.float32)
    two = tl.zeros([BLOCK], tl.float32)
    three = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits, keys = _load(row_ptr, ids, vocab)
        kept = _kept(keys, ids, low, high, last_id) & (ids < vocab)
        value = tl.where(kept, 1.0, 0.0)
        if not COUNT:
            value *= _weight(logits, peak, temperature)
        one += tl.where(keys >= first, value, 0.0)
        two += tl.where(keys >= second, value, 0.0)
        three += tl.where(keys >= third, value, 0.0)
    return (
        tl.sum(one.to(tl.float64), axis=0),
        tl.sum(two.to(tl.float64), axis=0),
        tl.sum(three.to(tl.float64), axis=0),
    )


@triton.jit
def _edge(
    row_ptr, vocab, peak, temperature, low, high, last_id, share,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the last of the likeliest tokens that are kept: (low key, high key, last id).

    COUNT: `share` tokens are kept; else as many as it takes to reach `share` of the weight. Among
    tokens already limited by low, high and last_id. Those with keys above the high key are kept,
    and those from the low key on up to the last id.
    """
    top = _key(peak).to(tl.int64)
    start = tl.full([], _LOWEST_KEY, tl.int64)
    end = top
    target = share.to(tl.float64)
    if not COUNT:
        everything, _unused, _unused_too = _measure(
            row_ptr, vocab, peak, temperature, low, high, last_id,
            tl.full([], _LOWEST_KEY, tl.int32), _key(peak), _key(peak), COUNT, BLOCK,
        )  # fmt: skip
        target = target * everything
    above = tl.full([], 0.0, tl.float64)  # the measure of keys > end
    while start < end:
        step = (end - start + 3) // 4
        first = start + step
        second = tl.minimum(first + step, end)
        third = tl.minimum(second + step, end)
        one, two, three = _measure(
            row_ptr, vocab, peak, temperature, low, high, last_id,
            first.to(tl.int32), second.to(tl.int32), third.to(tl.int32), COUNT, BLOCK,
        )  # fmt: skip
        start, end, above = _narrow(
            start, end, above, first, second, third, one, two, three, target
        )
    rest = target - above
    edge = start.to(tl.int32)
    if not COUNT:
        logit = tl.where(edge < 0, edge ^ 0x7FFFFFFF, edge).to(tl.float32, bitcast=True)
        rest = tl.ceil(rest / _weight(logit, peak, temperature).to(tl.float64))
    needed = tl.maximum(rest, 1.0)
    return edge, edge, _nth(row_ptr, vocab, low, high, last_id, edge, needed, BLOCK)


@triton.jit
def _narrow(start, end, above, first, second, third, one, two, three, target):
    """Keep that fourth of the range of keys in which the measure reaches the target."""
    if three >= target:
        start = third
    elif two >= target:
        start = second
        end = third - 1
        above = three
    elif one >= target:
        start = first
        end = second - 1
        above = two
    else:
        end = first - 1
        above = one
    return start, tl.maximum(start, end), above


@triton.jit
def _nth(row_ptr, vocab, low, high, last_id, edge, needed, BLOCK: tl.constexpr):
    """Return the id of the `needed`-th kept token whose key is `edge`, or of the last."""
    found = tl.full([], 0.0, tl.float64)
    result = -1
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits, keys = _load(row_ptr, ids, vocab)
        equal = _kept(keys, ids, low, high, last_id) & (keys == edge) & (ids < vocab)
        rank = found + tl.cumsum(equal.to(tl.int32), axis=0).to(tl.float64)
        result = tl.maximum(result, tl.max(tl.where(equal & (rank <= needed), ids, -1), axis=0))
        found += tl.sum(equal.to(tl.int32), axis=0).to(tl.float64)
    return result
