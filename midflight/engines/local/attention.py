"""Attention over a trunk that all rows share, and each row's own suffix.

The trunk's keys and values are held once, [kv heads, P, d], whatever the number of rows; scores over trunk and suffix
share one softmax, so the result equals plain attention over their concatenation. The model's code stays transformers'.
"""

from __future__ import annotations

from typing import Any

import torch
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
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    trunk: list[LayerKV] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention hook: sdpa without a trunk, shared-trunk attention with one.

    query [B, H, T, d]; key, value [B, kv heads, S, d] are the suffix; attention_mask is additive [B, 1, T, S] over it.
    """
    if trunk is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None
    rows, heads, tokens, width = query.shape
    groups = key.shape[1]
    trunk_key, trunk_value = trunk[module.layer_idx]  # type: ignore[index]
    scale = scaling if scaling is not None else width**-0.5
    own = query.reshape(rows, groups, -1, width)  # the heads of a group, and their tokens, in one axis
    folded = own.transpose(0, 1).reshape(1, groups, -1, width)
    if attention_mask is not None:
        attention_mask = attention_mask.repeat(1, 1, heads // groups, 1)
    if query.device.type == "cpu":
        output = _merged(folded, trunk_key[None], trunk_value[None], own, key, value, attention_mask, scale)
    else:
        output = _joined(folded, trunk_key[None], trunk_value[None], own, key, value, attention_mask, scale)
    return output.reshape(rows, heads, tokens, width).transpose(1, 2).contiguous(), None


def _merged(
    folded: torch.Tensor,
    trunk_key: torch.Tensor,
    trunk_value: torch.Tensor,
    own: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Two fused attentions, put together by their log-sum-exps; holds no scores. [rows, groups, heads x T, d]."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    shape = own.shape
    over_trunk, trunk_sum = fused(folded, trunk_key, trunk_value, scale=scale)
    over_own, own_sum = fused(own, key, value, attn_mask=mask, scale=scale)
    over_trunk = over_trunk[0].view(shape[1], shape[0], shape[2], shape[3]).transpose(0, 1)
    trunk_sum = trunk_sum[0].view(shape[1], shape[0], shape[2]).transpose(0, 1)
    share = torch.sigmoid(trunk_sum - own_sum)[..., None].to(own.dtype)
    merged: torch.Tensor = share * over_trunk + (1 - share) * over_own
    return merged


def _joined(
    folded: torch.Tensor,
    trunk_key: torch.Tensor,
    trunk_value: torch.Tensor,
    own: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """One softmax over the scores of trunk and suffix, written out; for devices without the fused kernel above."""
    rows, groups, _, width = own.shape
    length = trunk_key.shape[2]
    shared = (folded[0] @ trunk_key[0].transpose(-1, -2)).view(groups, rows, -1, length).transpose(0, 1)
    scores = own @ key.transpose(-1, -2)
    scores = scores * scale if mask is None else scores * scale + mask
    weights = torch.cat([shared * scale, scores], dim=-1).softmax(dim=-1)
    over_trunk = weights[..., :length].transpose(0, 1).reshape(groups, -1, length) @ trunk_value[0]
    return weights[..., length:] @ value + over_trunk.view(groups, rows, -1, width).transpose(0, 1)


def register() -> None:
    """Make the attention known to transformers under `NAME`; idempotent."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _sdpa_mask)


def _sdpa_mask(*args: Any, **kwargs: Any) -> Any:
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(*args, **kwargs)


class SuffixCache:
    """Keys and values of the rows' suffixes in one preallocated block a layer; columns are shared by all rows.

    Stands where transformers expects a cache: the model calls `update` once a layer in each forward, which writes at
    the columns after `used`, in the rows that `focus` chose.
    """

    is_compileable = False

    def __init__(self, layers: int, rows: int, columns: int) -> None:
        self._blocks: list[LayerKV | None] = [None] * layers
        self._rows, self._columns = rows, columns
        self._first, self._last = 0, rows
        self.used = 0

    def focus(self, first: int, last: int, used: int) -> None:
        """Work on rows [first, last), and write next at column `used`."""
        self._first, self._last, self.used = first, last, used

    def _block(self, layer: int, like: torch.Tensor) -> LayerKV:
        """A layer's keys and values, each [rows, kv heads, columns, d]; made when first asked for."""
        block = self._blocks[layer]
        if block is None:
            shape = (self._rows, like.shape[-3], self._columns, like.shape[-1])
            block = (like.new_zeros(shape), like.new_zeros(shape))
            self._blocks[layer] = block
        return block

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [rows in focus, kv heads, T, d] at the next columns; give back all columns up to there."""
        block = self._block(layer_idx, key)
        end = self.used + key.shape[2]
        rows = slice(self._first, self._last)
        block[0][rows, :, self.used : end] = key
        block[1][rows, :, self.used : end] = value
        return block[0][rows, :, :end], block[1][rows, :, :end]

    def advance(self, tokens: int) -> None:
        """Count the columns the last forward wrote."""
        self.used += tokens

    def load(self, stems: list[list[LayerKV] | None]) -> None:
        """Put a stem into each row in focus, [kv heads, length, d] a layer, ending before the next column."""
        for row, stem in enumerate(stems, self._first):
            for index, (key, value) in enumerate(stem or ()):
                block = self._block(index, key)
                columns = slice(self.used - key.shape[1], self.used)
                block[0][row, :, columns] = key
                block[1][row, :, columns] = value

    def copy(self, row: int, spans: list[tuple[int, int]]) -> list[LayerKV]:
        """Keys and values of one row's columns in `spans`, [kv heads, length, d] a layer."""
        layers: list[LayerKV] = []
        for block in self._blocks:
            assert block is not None
            key, value = (torch.cat([part[row, :, a:b] for a, b in spans], dim=1) for part in block)
            layers.append((key, value))
        return layers

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows, in this order (a row may be repeated); unwritten columns start anew."""
        for index, block in enumerate(self._blocks):
            if block is not None:
                key, value = (part.new_empty(len(rows), part.shape[1], self._columns, part.shape[3]) for part in block)
                key[:, :, : self.used] = block[0][rows, :, : self.used]
                value[:, :, : self.used] = block[1][rows, :, : self.used]
                self._blocks[index] = (key, value)
        self._rows = len(rows)
        self._first, self._last = 0, len(rows)

    def layer(self, index: int) -> LayerKV:
        """Used keys and values of one layer, each [rows, kv heads, used, d]."""
        block = self._blocks[index]
        assert block is not None
        return block[0][:, :, : self.used], block[1][:, :, : self.used]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.used

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.used + query_length, 0
