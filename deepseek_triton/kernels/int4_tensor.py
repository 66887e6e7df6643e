"""INT4 weights in the order in which the kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP_SIZES = (32, 64, 128)
_COLUMNS = 128  # of K whose codes share 32 words; tiles.py reads them
# What `tiles.spread` adds to a code; zero points hold it too.
_BASE = {torch.float16: 1024.0, torch.bfloat16: 128.0, torch.float32: 128.0}


@dataclass(frozen=True)
class Int4Tensor:
    """weight[…, n, k] = (code − zero point) · scale of its group, for one matrix or for experts.

    In each block of 128 columns of K, word j of a row holds the codes of columns j, 32 + j, 64 + j
    and 96 + j from its lowest nibble up; K is filled up to a multiple of 128. Rows of a block lie
    side by side, so that a tile of rows is one stretch of memory.
    """

    codes: torch.Tensor  # […, ⌈K / 128⌉, N, 32] int16
    # float32 although `dtype` would hold them: copies into shared memory take 4 bytes or more.
    scales: torch.Tensor  # […, G, N] float32; G = ⌈K / group_size⌉
    zeros: torch.Tensor | None  # […, G, N] float32, zero point + base; None = 8 everywhere
    group_size: int
    width: int  # K
    dtype: torch.dtype  # of the layer's input and output

    @property
    def shape(self) -> tuple[int, ...]:
        """[…, N, K]."""
        return (*self.codes.shape[:-3], self.codes.shape[-2], self.width)

    def dense(self) -> torch.Tensor:
        """Return the weights […, N, K] in `dtype`, computed in float32."""
        blocks = self.codes.transpose(-3, -2)
        quarters = [(blocks >> shift) & 15 for shift in (0, 4, 8, 12)]
        columns = torch.cat(quarters, -1).flatten(-2)[..., : self.width]
        group = torch.arange(self.width, device=columns.device) // self.group_size
        zero: torch.Tensor | float = 8.0
        if self.zeros is not None:
            zero = (self.zeros - _BASE[self.dtype]).mT[..., group]
        return ((columns.float() - zero) * self.scales.mT[..., group]).to(self.dtype)


def pack_int4(
    packed: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor | None, group_size: int
) -> Int4Tensor:
    """Reorder weights stored two codes a byte along K, low nibble first.

    packed […, N, K/2] uint8, scales […, N, G] of the layer's dtype, zero_points […, N, G] 0 … 15,
    or None for 8. All zero points being 8 counts as None. Copies, on its arguments' device.

    Raises:
        ValueError: a shape or the group size does not fit.
    """
    width = packed.shape[-1] * 2
    if group_size not in GROUP_SIZES:
        raise ValueError(f"INT4 group size {group_size}; the kernels take {GROUP_SIZES}")
    if scales.shape != (*packed.shape[:-1], -(-width // group_size)):
        raise ValueError(f"INT4 scales {tuple(scales.shape)} for codes {tuple(packed.shape)}")
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    codes = torch.nn.functional.pad(codes, (0, -width % _COLUMNS))
    q0, q1, q2, q3 = codes.unflatten(-1, (-1, 4, _COLUMNS // 4)).unbind(-2)
    low, high = q0 | q1 << 4, q2 | q3 << 4
    words = torch.stack([low, high], -1).flatten(-2).view(torch.int16)  # little endian
    words = words.transpose(-3, -2).contiguous()
    zeros = None
    if zero_points is not None and bool((zero_points != 8).any()):
        zeros = (zero_points.mT.float() + _BASE[scales.dtype]).contiguous()
    tables = scales.mT.float().contiguous()
    return Int4Tensor(words, tables, zeros, group_size, width, scales.dtype)
