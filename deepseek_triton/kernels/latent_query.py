"""All that comes before latent attention in a decode step, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepseek_triton.kernels.append_kv import append_latent_reference, latent_rows
from deepseek_triton.kernels.launch import await_inputs, dependent_launch
from deepseek_triton.kernels.rotary import rotary_reference, rotated

_ROWS = 4  # new rows of the cache that one program makes


def latent_query(
    q: torch.Tensor,
    kv_a: torch.Tensor,
    kv_norm: torch.Tensor,
    eps: float,
    w_uk: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    interleaved: bool,
    block_r: int = 128,
    block_b: int | None = None,
) -> torch.Tensor:
    """Return queries [B, H, rank + rope] in the latent space; write the new rows into the pool.

    q [B, H · (nope + rope)] and kv_a [B, rank + rope] may be views with contiguous rows; w_uk
    [H, nope, rank] takes a query's first part into the latent space (arXiv 2405.04434, section
    2.1), its second is turned. The other arguments are those of `append_latent`. Mutates pool.
    """
    batch = q.shape[0]
    heads, nope, rank = w_uk.shape
    rope = cos.shape[-1]
    out = torch.empty(batch, heads, rank + rope, dtype=q.dtype, device=q.device)
    block_b = block_b or (1 if batch == 1 else 16 if batch <= 64 else 64)
    block_r = min(block_r, max(16, triton.next_power_of_2(rank)))
    rows = min(_ROWS, block_b)
    programs = heads * (triton.cdiv(rank, block_r) + 1)
    _latent_query[(programs + block_b // rows, triton.cdiv(batch, block_b))](
        q, kv_a, kv_norm, w_uk, cos, sin, pool, slots, out,
        batch, q.stride(0), kv_a.stride(0), out.stride(0), eps,
        NOPE=nope, BLOCK_K=max(16, triton.next_power_of_2(nope)),
        RANK=rank, BLOCK_D=triton.next_power_of_2(rank), BLOCK_R=block_r,
        ROPE=rope, BLOCK_P=triton.next_power_of_2(rope),
        HEADS=heads, BLOCK_B=block_b, ROWS=rows,
        INTERLEAVED=interleaved, IEEE=q.dtype == torch.float32,
        num_warps=2 if batch == 1 else 4, **dependent_launch(q),
    )  # fmt: skip
    return out


def latent_query_reference(
    q: torch.Tensor,
    kv_a: torch.Tensor,
    kv_norm: torch.Tensor,
    eps: float,
    w_uk: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    interleaved: bool,
) -> torch.Tensor:
    """Compute `latent_query` in float64 and round once. Mutates pool."""
    append_latent_reference(kv_a, kv_norm, eps, cos, sin, pool, slots, interleaved=interleaved)
    heads, nope, _ = w_uk.shape
    q_nope, q_rope = q.unflatten(1, (heads, -1)).split((nope, cos.shape[-1]), dim=-1)
    latent = torch.einsum("bhn,hnr->bhr", q_nope.double(), w_uk.double()).to(q.dtype)
    return torch.cat((latent, rotary_reference(q_rope, cos, sin, interleaved=interleaved)), dim=-1)


@triton.jit
def _latent_query(
    q_ptr, kv_ptr, norm_ptr, w_ptr, cos_ptr, sin_ptr, pool_ptr, slots_ptr, out_ptr,
    batch, q_stride, kv_stride, out_stride, eps,
    NOPE: tl.constexpr, BLOCK_K: tl.constexpr, RANK: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, ROPE: tl.constexpr, BLOCK_P: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_B: tl.constexpr, ROWS: tl.constexpr,
    INTERLEAVED: tl.constexpr, IEEE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, j) is for BLOCK_B rows: BLOCK_R latent dimensions of a head's queries.

    A head's last program turns the queries' second part instead. After the heads come programs that
    make ROWS rows of the cache each.
    """
    chunks: tl.constexpr = (RANK + BLOCK_R - 1) // BLOCK_R
    i = tl.program_id(0)
    begin = tl.program_id(1) * BLOCK_B
    if i >= HEADS * (chunks + 1):
        t = begin + (i - HEADS * (chunks + 1)) * ROWS + tl.arange(0, ROWS)
        await_inputs(PDL)
        latent_rows(
            kv_ptr, norm_ptr, cos_ptr, sin_ptr, pool_ptr, slots_ptr, None, t, t < batch,
            kv_stride, eps, RANK, ROPE, BLOCK_D, BLOCK_P, INTERLEAVED,
        )  # fmt: skip
        return
    head, chunk = (i // (chunks + 1)).to(tl.int64), i % (chunks + 1)
    row = (begin + tl.arange(0, BLOCK_B)).to(tl.int64)[:, None]
    valid = row < batch
    q_rows = q_ptr + row * q_stride + head * (NOPE + ROPE)
    out_rows = out_ptr + row * out_stride + head * (RANK + ROPE)
    if chunk == chunks:
        p = tl.arange(0, BLOCK_P)[None, :]
        inside = valid & (p < ROPE)
        await_inputs(PDL)
        turned = rotated(
            q_rows + NOPE, cos_ptr + row * ROPE, sin_ptr + row * ROPE, p, inside, ROPE, INTERLEAVED
        )
        tl.store(out_rows + RANK + p, turned, mask=inside)
        return
    k = tl.arange(0, BLOCK_K)
    r = chunk * BLOCK_R + tl.arange(0, BLOCK_R)
    w_mask = (k < NOPE)[:, None] & (r < RANK)[None, :]
    w = tl.load(w_ptr + (head * NOPE + k[:, None]) * RANK + r[None, :], mask=w_mask, other=0)
    await_inputs(PDL)
    q = tl.load(q_rows + k[None, :], mask=valid & (k < NOPE)[None, :], other=0)
    if BLOCK_B == 1:
        column = tl.sum(q, axis=0).to(tl.float32)  # [1, K] → [K]
        latent = tl.sum(w.to(tl.float32) * column[:, None], axis=0)[None, :]
    else:
        latent = tl.dot(q, w, input_precision="ieee" if IEEE else "tf32")
    tl.store(out_rows + r[None, :], latent, mask=valid & (r < RANK)[None, :])
