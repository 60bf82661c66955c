"""The few building blocks that heads share: rotary attention with a drafting and a training side, a norm, a gated MLP.

Shapes: B batch, L length, S keys, D width, H query heads, G key/value heads, W head width.
"""

from typing import TypeAlias

import torch
from torch import Tensor, nn

from specheads.cache import GrowingBuffer

Rotation: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines of rotary positions, each (B, 1, L, W); B may be 1."""


_FEW_ROWS = 16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, as fast as reading the weights allows where nothing is trained and rows are few.

    Drafting reads one row a step: in bfloat16 on a CPU the matrix-vector product reads the weights half again as fast.
    Rows of a draft are few: see `few_rows`.
    """
    if x.numel() == weight.shape[1] and x.dtype == weight.dtype and not torch.is_grad_enabled():
        product = torch.mv(weight, x.flatten())
        return (product if bias is None else product + bias).view(*x.shape[:-1], -1)
    return few_rows(x, weight, bias)


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`; a handful of rows in float32 on a CPU are multiplied from the weights' side.

    With the weights as the left factor their long dimension is the one that the matrix product is split along, and four
    rows cost what one costs; as the right factor, the usual way, they cost twice that.
    """
    rows = x.numel() // weight.shape[1]
    few = 1 < rows <= _FEW_ROWS and x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    if not few or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return nn.functional.linear(x, weight, bias)
    product = torch.mm(weight, x.reshape(rows, -1).t()).t().contiguous()
    return (product if bias is None else product + bias).view(*x.shape[:-1], -1)


class Linear(nn.Linear):
    """`torch.nn.Linear` through `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class FewRowsLinear(nn.Linear):
    """`torch.nn.Linear` through `few_rows`: what the linear layers of a target become when it is loaded."""

    def forward(self, x: Tensor) -> Tensor:
        return few_rows(x, self.weight, self.bias)


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm (arXiv 1910.07467), computed in the weight's dtype and given back in the input's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class GatedMLP(nn.Module):
    """down(SiLU(gate x) * up x), as in Llama."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, inner, bias=False)
        self.up_proj = Linear(width, inner, bias=False)
        self.down_proj = Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class RotaryAttention(nn.Module):
    """Grouped-query attention with rotary positions, `in_width` read and `out_width` written.

    Drafting appends to growing buffers; training attends to the context's keys and, for later steps of the
    training-time test, to one own key of each step before (`attend_steps`). Both give the same numbers along the same
    tokens.
    """

    def __init__(self, in_width: int, out_width: int, *, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.q_proj = Linear(in_width, num_heads * head_dim, bias=False)
        self.k_proj = Linear(in_width, num_kv_heads * head_dim, bias=False)
        self.v_proj = Linear(in_width, num_kv_heads * head_dim, bias=False)
        self.o_proj = Linear(num_heads * head_dim, out_width, bias=False)

    def queries_keys_values(self, x_BLD: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries (B, H, L, W) and keys, values (B, G, L, W)."""
        shape = (*x_BLD.shape[:2], -1, self.head_dim)
        query = self.q_proj(x_BLD).view(shape).transpose(1, 2)
        key = self.k_proj(x_BLD).view(shape).transpose(1, 2)
        value = self.v_proj(x_BLD).view(shape).transpose(1, 2)
        return rotate(query, rotation), rotate(key, rotation), value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attention output (B, L, D) of queries (B, H, L, W) over keys (B, G, S, W); `mask` is True where allowed."""
        groups = self.num_heads // self.num_kv_heads
        if query.shape[2] == 1 and mask is None:  # one query: fold a group's heads into the length, copy no key
            folded = query.reshape(query.shape[0], self.num_kv_heads, groups, self.head_dim)
            out = nn.functional.scaled_dot_product_attention(folded, key, value)
            return self._merge(out.reshape(query.shape))
        key, value = _repeat(key, groups), _repeat(value, groups)
        return self._merge(nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask))

    def attend_steps(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, steps: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Attention over the context's keys (masked) and over each row's own key of the `steps` so far.

        Row t sees context keys up to t and, for each step, only the key at row t: what a chain drafted from t cached.
        """
        groups = self.num_heads // self.num_kv_heads
        key, value = _repeat(key, groups), _repeat(value, groups)
        own_keys = torch.stack([_repeat(k, groups) for k, _ in steps], dim=3)  # (B, H, L, steps, W)
        own_values = torch.stack([_repeat(v, groups) for _, v in steps], dim=3)
        scale = self.head_dim**-0.5
        context = (query @ key.transpose(-1, -2) * scale).masked_fill(~mask, -torch.inf)
        own = (own_keys @ query[..., None]).squeeze(-1) * scale
        weights = torch.cat([context, own], dim=-1).softmax(-1, dtype=torch.promote_types(query.dtype, torch.float32))
        weights = weights.to(value.dtype)
        split = key.shape[2]
        out = weights[..., :split] @ value + (weights[..., None, split:] @ own_values).squeeze(-2)
        return self._merge(out)

    def _merge(self, out_BHLW: Tensor) -> Tensor:
        return self.o_proj(out_BHLW.transpose(1, 2).flatten(2))


class Places:
    """Some positions of each row, moved side by side: M of L. Rows that have fewer are filled up with position 0."""

    def __init__(self, chosen_BL: Tensor) -> None:
        rows, length = chosen_BL.shape
        counts_B = chosen_BL.sum(1)
        order_BM = chosen_BL.byte().argsort(dim=1, descending=True, stable=True)[:, : max(int(counts_B.max()), 1)]
        ranks_M = torch.arange(order_BM.shape[1], device=chosen_BL.device)
        starts_B1 = length * torch.arange(rows, device=chosen_BL.device)[:, None]
        self.shape_BL = chosen_BL.shape
        self._real_N = (ranks_M < counts_B[:, None]).flatten()
        self._flat_BM = torch.where(ranks_M < counts_B[:, None], order_BM, 0) + starts_B1

    def take(self, x_BL: Tensor) -> Tensor:
        """(B, L, ...) to (B, M, ...)."""
        return x_BL.flatten(0, 1).index_select(0, self._flat_BM.flatten()).unflatten(0, self._flat_BM.shape)

    def put_back(self, x_BM: Tensor) -> Tensor:
        """(B, M, ...) to (B, L, ...), zeros at the positions that were not chosen."""
        rows, length = self.shape_BL
        everywhere = x_BM.new_zeros(rows * length, *x_BM.shape[2:])
        chosen = x_BM.flatten(0, 1)[self._real_N]
        return everywhere.index_copy(0, self._flat_BM.flatten()[self._real_N], chosen).unflatten(0, self.shape_BL)


class KeyValueBuffers:
    """Keys and values of one attention layer of a head while it drafts."""

    def __init__(self) -> None:
        self.keys, self.values = GrowingBuffer(), GrowingBuffer()

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.keys.append(key), self.values.append(value)

    def rollback(self, length: int) -> None:
        self.keys.length = self.values.length = length


def rotary(positions_BL: Tensor, head_dim: int, theta: float) -> Rotation:
    """Rotary positions (Su et al., arXiv 2104.09864) in the halves layout of Llama, float32."""
    exponents = torch.arange(0, head_dim, 2, device=positions_BL.device, dtype=torch.float32) / head_dim
    angles = positions_BL[:, None, :, None].float() * theta**-exponents
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


class RotaryTable:
    """The rotations of positions 0, 1, 2, ...: computed once for all steps of a drafting, grown by doubling."""

    def __init__(self, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device) -> None:
        self.head_dim, self.theta, self.dtype, self.device = head_dim, theta, dtype, device
        self._grow(256)

    def at(self, first: int, length: int) -> Rotation:
        """Rotation of positions `first` to `first + length - 1`; copies nothing."""
        if first + length > self._cos.shape[2]:
            self._grow(2 * (first + length))
        part = slice(first, first + length)
        return self._cos[:, :, part], self._sin[:, :, part]

    def _grow(self, length: int) -> None:
        cos, sin = rotary(torch.arange(length, device=self.device)[None], self.head_dim, self.theta)
        self._cos, self._sin = cos.to(self.dtype), sin.to(self.dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Apply rotary positions to (B, H, L, W)."""
    cos, sin = (table.to(x.dtype) for table in rotation)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def block_mask(new: int, total: int, device: torch.device) -> Tensor | None:
    """Causal mask (new, total) for `new` queries at the end of `total` keys; None where nothing is hidden."""
    if new == 1:
        return None
    return torch.ones(new, total, dtype=torch.bool, device=device).tril(total - new)


def _repeat(x_BGSW: Tensor, groups: int) -> Tensor:
    return x_BGSW if groups == 1 else x_BGSW.repeat_interleave(groups, dim=1)
