"""Attention over a trunk that all rows share, and each row's own suffix.

The trunk's keys and values are held once, [kv heads, P, d], whatever the number of rows; scores over trunk and suffix
share one softmax, so the result equals plain attention over their concatenation. The model's code stays transformers'.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "midflight"

LayerKV = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, each [kv heads, P, d]."""


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | BlockMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    trunk: list[LayerKV] | None = None,
    exact: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention hook: sdpa without a trunk, shared-trunk attention with one, flex under a block mask.

    query [B, H, T, d]; key, value [B, kv heads, S, d] are the suffix; attention_mask is additive [B, 1, T, S] over it.
    `exact`, on the CPU: computed in float64 and rounded to the query's type, so that equal tokens give equal bits
    wherever trunk and suffix part and whatever hidden columns are between; key, value and trunk may be float64 already.
    """
    if isinstance(attention_mask, BlockMask):
        flexed: Any = _flex(query.device.type)(
            query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        return flexed.transpose(1, 2).contiguous(), None
    if trunk is None and not exact:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None
    rows, heads, tokens, width = query.shape
    groups = key.shape[1]
    scale = scaling if scaling is not None else width**-0.5
    own = query.reshape(rows, groups, -1, width)  # the heads of a group, and their tokens, in one axis
    if attention_mask is not None:
        attention_mask = attention_mask.repeat(1, 1, heads // groups, 1)
    if trunk is None:
        output = _Exact.apply(own, key, value, attention_mask, scale)  # type: ignore[no-untyped-call]
    else:
        trunk_key, trunk_value = trunk[module.layer_idx]  # type: ignore[index]
        if exact:
            own, key, value, trunk_key, trunk_value, attention_mask = _in(
                torch.float64, own, key, value, trunk_key, trunk_value, attention_mask
            )
        merge = _merged if query.device.type == "cpu" else _joined
        output = merge(own, key, value, trunk_key, trunk_value, attention_mask, scale)  # type: ignore[arg-type]
        output = output.to(query.dtype)
    return output.reshape(rows, heads, tokens, width).transpose(1, 2).contiguous(), None


def _in(dtype: torch.dtype, *parts: torch.Tensor | None) -> Any:
    return [None if part is None else part.to(dtype) for part in parts]


def _wide(part: torch.Tensor) -> torch.dtype:
    """What to sum in where the parts are of 16 bits; else their own type."""
    return torch.promote_types(part.dtype, torch.float32)


class _Exact(torch.autograd.Function):
    """Fused attention on the CPU, forward in float64, backward in the query's type; holds no scores."""

    @staticmethod
    def forward(
        ctx: Any, own: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        """own [rows, groups, heads x T, d]; key, value [rows, groups, S, d]."""
        query, keys, values, wide = _in(torch.float64, own, key, value, mask)
        found, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, attn_mask=wide, scale=scale
        )
        output: torch.Tensor = found.to(own.dtype)
        ctx.save_for_backward(own, key, value, mask, output, total.to(own.dtype))
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        own, key, value, mask, output, total = ctx.saved_tensors
        to_own, to_key, to_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad.contiguous(), own, key, value, output, total, 0.0, False, attn_mask=mask, scale=ctx.scale
        )
        return to_own, to_key, to_value, None, None


@cache
def _flex(device: str) -> Any:
    """Flex attention, compiled where there is a kernel for it (Dong et al. 2024, arXiv 2412.05496)."""
    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention


def block_mask(visible: torch.Tensor) -> BlockMask:
    """A mask for flex attention, which skips the blocks in which no token sees another; visible [T, S], boolean."""

    def sees(batch: Any, head: Any, token: Any, key: Any) -> Any:
        return visible[token, key]

    tokens, keys = visible.shape
    return create_block_mask(sees, None, None, tokens, keys, device=str(visible.device))


def _merged(
    own: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    trunk_key: torch.Tensor,
    trunk_value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Two fused attentions put together by their log-sum-exps; holds no scores, and has no gradient.

    own [rows, groups, heads x T, d]; key, value [rows, groups, S, d]; trunk_* [groups, P, d].
    """
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    over_trunk, trunk_sum = fused(_fold(own), trunk_key[None], trunk_value[None], scale=scale)
    over_own, own_sum = fused(own, key, value, attn_mask=mask, scale=scale)
    over_trunk, trunk_sum = _unfold(over_trunk, own), _unfold(trunk_sum[..., None], own)
    share = torch.sigmoid(trunk_sum - own_sum[..., None]).to(_wide(own))
    output: torch.Tensor = share * over_trunk + (1 - share) * over_own
    return output


def _fold(part: torch.Tensor) -> torch.Tensor:
    """[rows, groups, n, d] as [1, groups, rows x n, d]."""
    return part.transpose(0, 1).reshape(1, part.shape[1], -1, part.shape[3])


def _unfold(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[1, groups, rows x n, d] as [rows, groups, n, d], rows and n as in `like`."""
    rows, groups, count, _ = like.shape
    return part[0].view(groups, rows, count, -1).transpose(0, 1)


def _joined(
    own: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    trunk_key: torch.Tensor,
    trunk_value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """The same as `_merged` with one softmax over all scores written out; for devices without that fused kernel.

    Scores and weights are not rounded to 16 bits, as in the kernels.
    """
    own, key, value, trunk_key, trunk_value, mask = _in(_wide(own), own, key, value, trunk_key, trunk_value, mask)
    length = trunk_key.shape[1]
    shared = _unfold((_fold(own)[0] @ trunk_key.transpose(-1, -2))[None], own)
    scores = own @ key.transpose(-1, -2)
    scores = scores * scale if mask is None else scores * scale + mask
    weights = torch.cat([shared * scale, scores], dim=-1).softmax(dim=-1)
    over_trunk = _fold(weights[..., :length])[0] @ trunk_value
    return weights[..., length:] @ value + _unfold(over_trunk[None], own)


def register() -> None:
    """Make the attention known to transformers under `NAME`; idempotent."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _sdpa_mask)


def _sdpa_mask(*args: Any, **kwargs: Any) -> Any:
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(*args, **kwargs)


class SuffixCache:
    """Keys and values of the rows' suffixes in one block; columns are shared by all rows.

    Stands where transformers expects a cache: the model calls `update` once a layer in each forward, which writes at
    the columns after `used`, in the rows that `focus` chose. The block, [layers, 2, rows, kv heads, columns, d], starts
    uninitialised (on the CPU it costs memory only where it is written); `load` blanks what a row will never write. For
    `exact` attention it holds float64, so that nothing is converted twice; `read` gives the model's type.
    """

    is_compileable = False

    def __init__(self, model: Any, rows: int, columns: int, *, exact: bool = False) -> None:
        config = model.config
        groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._block = torch.empty(
            (config.num_hidden_layers, 2, rows, groups, columns, width),
            dtype=torch.float64 if exact else model.dtype,
            device=model.device,
        )
        self._dtype = model.dtype
        self._first, self._last = 0, rows
        self.used = 0

    def focus(self, first: int, last: int, used: int) -> None:
        """Work on rows [first, last), and write next at column `used`."""
        self._first, self._last, self.used = first, last, used

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [rows in focus, kv heads, T, d] at the next columns; give back all columns up to there."""
        keys, values = self._block[layer_idx, :, self._first : self._last]
        end = self.used + key.shape[2]
        keys[:, :, self.used : end] = key
        values[:, :, self.used : end] = value
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, tokens: int) -> None:
        """Count the columns the last forward wrote."""
        self.used += tokens

    def load(self, row: int, pieces: list[torch.Tensor]) -> None:
        """Put pieces [layers, 2, kv heads, n, d] into a row, one after the other, the last ending before `used`.

        The columns before them, which masks hide, are zeroed: a hidden NaN would still spread.
        """
        start = self.used - sum(piece.shape[-2] for piece in pieces)
        self._block[:, :, row, :, :start] = 0
        for piece in pieces:
            self._block[:, :, row, :, start : start + piece.shape[-2]] = piece
            start += piece.shape[-2]

    def read(self, row: int, first: int, last: int) -> torch.Tensor:
        """Keys and values of a row's columns [first, last), [layers, 2, kv heads, last - first, d]; may be a view."""
        return self._block[:, :, row, :, first:last].to(self._dtype)

    def move(self, targets: list[int], sources: list[int]) -> None:
        """Copy what rows `sources` hold to rows `targets`; no row may be both."""
        self._block[:, :, targets, :, : self.used] = self._block[:, :, sources, :, : self.used]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.used

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.used + query_length, 0
