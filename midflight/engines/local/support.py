"""Can a model's attention be ours? Its logits on a small tree of tokens, computed in each way, are the answer.

A model that fails falls back to transformers' own forward (`plain.py`), one request and one row at a time: right for
any causal model, and slow.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from midflight.engines.local import attention
from midflight.engines.local.memory import is_out_of_memory
from midflight.engines.local.prefilling import make_trunk, prefill
from midflight.engines.local.prefixes import PrefixTree

_TREE = {"ids": [3, 5, 7, 11, 13, 17, 19], "parents": [-1, 0, 1, 2, 3, 2, 5], "depths": [0, 1, 2, 3, 4, 3, 4]}
"""Two sequences of five tokens that share three."""
_PATHS = ([0, 1, 2, 3, 4], [0, 1, 2, 5, 6])
_BEHIND = (1e-3, 0.2)
"""Of the largest logit, in 32 and in 16 bits: sums in another order move the embedded model's by 7e-6 and by 0.06."""

FAULTS = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError)
"""What the code of a model raises when it meets what it does not expect: then it is not one that takes our mask."""


def is_ours(model: Any) -> bool:
    """Whether the model runs on Midflight's attention."""
    return bool(model.config._attn_implementation == attention.NAME)


@torch.no_grad()
def adopt(model: Any, context_length: int | None = None) -> str:
    """Give `model` Midflight's attention, or leave it as it is; the reason why not, empty when it could be.

    It will see no more than `context_length` tokens. Memory that runs out is no reason, and raised.
    """
    if reason := unlike(model.config, context_length):
        return reason
    own = model.config._attn_implementation
    ids = torch.tensor(_TREE["ids"], device=model.device) % model.config.vocab_size
    plain = torch.cat([model(input_ids=ids[None, path]).logits for path in _PATHS]).float()
    try:
        model.set_attn_implementation(attention.NAME)
        if not is_ours(model):
            raise ValueError("its attention cannot be replaced")
        ways = {
            "on a packed tree of tokens": (_packed_logits(model, ids)[torch.tensor(_PATHS)], plain, (1e-4, 5e-2)),
            "behind a trunk": (_drawn_logits(model, ids), plain[:, -1], _BEHIND),
        }
    except FAULTS as error:
        if is_out_of_memory(error):
            raise
        reason = f"it does not take a packed tree of tokens or a trunk ({' '.join(str(error).split())[:160]})"
    else:
        for way, (found, right, bounds) in ways.items():
            gap = float((found - right).abs().max() / right.abs().max())
            if not gap <= bounds[model.dtype != torch.float32]:
                reason = f"its logits {way} are off by {gap:.1%} of the largest"
    if reason:
        model.set_attn_implementation(own)
    return reason


def unlike(config: Any, context_length: int | None = None) -> str:
    """What about a model a short text cannot show; empty when there is nothing.

    A window that is at least as long as the context hides nothing.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    windowed = window and getattr(config, "use_sliding_window", True)
    if window and context_length is not None and window >= context_length:
        kinds, windowed = kinds - {"sliding_attention"}, False
    if windowed if not kinds else kinds - {"full_attention"}:
        return f"it has layers of other kinds than full attention ({', '.join(sorted(kinds)) or 'a sliding window'})"
    return ""


def _packed_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits [nodes, vocabulary] of the tree as an update computes them: decoder, 4D mask, output embeddings."""
    visible = torch.eye(len(ids), dtype=torch.bool)
    for index, parent in enumerate(_TREE["parents"]):
        if parent >= 0:
            visible[index] |= visible[parent]
    mask = torch.zeros(visible.shape, dtype=model.dtype).masked_fill(~visible, torch.finfo(model.dtype).min)
    output = model.get_decoder()(
        input_ids=ids[None],
        position_ids=torch.tensor([_TREE["depths"]], device=model.device),
        attention_mask=mask[None, None].to(model.device),
        use_cache=False,
    )
    logits: torch.Tensor = model.get_output_embeddings()(output.last_hidden_state[0]).float()
    return logits


class _Watched(list[attention.LayerKV]):
    """The layers of a trunk, which note what was read of them."""

    def __init__(self, layers: list[attention.LayerKV]) -> None:
        super().__init__(layers)
        self.read: set[int] = set()

    def __getitem__(self, index: Any) -> Any:
        self.read.add(index)
        return super().__getitem__(index)


def _drawn_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits [paths, vocabulary] after each path as the sampler computes them, behind what the paths share."""
    prompts = [tuple(ids[path].tolist()) for path in _PATHS]
    tree = PrefixTree(len(ids))
    trunk = make_trunk(model, tree, prompts[0][:3])
    layers = _Watched(trunk.layers)
    filled = prefill(model, tree, replace(trunk, layers=layers), prompts)
    if len(layers.read) < len(layers):
        raise ValueError("its layers do not hand the trunk on to their attention")
    return filled.logits[[filled.prompts.index(prompt) for prompt in prompts]].float()
