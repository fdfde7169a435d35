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
    length = trunk_key.shape[1]
    query = query * (scaling if scaling is not None else width**-0.5)
    own = query.reshape(rows, groups, (heads // groups) * tokens, width)
    scores = own @ key.transpose(-1, -2)
    if attention_mask is not None:
        shape = (rows, groups, heads // groups, tokens, key.shape[2])
        scores = (scores.view(shape) + attention_mask[:, :, None]).view(scores.shape)
    if length:
        folded = own.transpose(0, 1).reshape(groups, -1, width)
        shared = (folded @ trunk_key.transpose(-1, -2)).view(groups, rows, -1, length).transpose(0, 1)
        weights = torch.cat([shared, scores], dim=-1).softmax(dim=-1)
        over_trunk = weights[..., :length].transpose(0, 1).reshape(groups, -1, length) @ trunk_value
        output = weights[..., length:] @ value
        output = output + over_trunk.view(groups, rows, -1, width).transpose(0, 1)
    else:
        output = scores.softmax(dim=-1) @ value
    return output.reshape(rows, heads, tokens, width).transpose(1, 2).contiguous(), None


def register() -> None:
    """Make the attention known to transformers under `NAME`; idempotent."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _sdpa_mask)


def _sdpa_mask(*args: Any, **kwargs: Any) -> Any:
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(*args, **kwargs)


class SuffixCache:
    """Keys and values of the rows' suffixes in one preallocated block a layer; columns are shared by all rows.

    Stands where transformers expects a cache: the model calls `update` once a layer in each forward.
    """

    is_compileable = False

    def __init__(self, layers: int, columns: int) -> None:
        self._blocks: list[LayerKV | None] = [None] * layers
        self._columns = columns
        self.used = 0

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [B, kv heads, T, d] at the next columns; give back all columns used so far."""
        block = self._blocks[layer_idx]
        if block is None:
            rows, heads, _, width = key.shape
            block = (key.new_zeros(rows, heads, self._columns, width), value.new_zeros(rows, heads, self._columns, width))
            self._blocks[layer_idx] = block
        end = self.used + key.shape[2]
        block[0][:, :, self.used : end] = key
        block[1][:, :, self.used : end] = value
        return block[0][:, :, :end], block[1][:, :, :end]

    def advance(self, tokens: int) -> None:
        """Count the columns the last forward wrote."""
        self.used += tokens

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows, in this order (a row may be repeated)."""
        self._blocks = [None if block is None else (block[0][rows], block[1][rows]) for block in self._blocks]

    def layer(self, index: int) -> LayerKV:
        """Used keys and values of one layer, each [B, kv heads, used, d]."""
        block = self._blocks[index]
        assert block is not None
        return block[0][:, :, : self.used], block[1][:, :, : self.used]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.used

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.used + query_length, 0
