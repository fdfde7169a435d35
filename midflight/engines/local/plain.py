"""Decoding by transformers' own forward, one sequence at a time: for models that Midflight's attention does not fit.

What is drawn, forced and reported is as in `decoding.py`, which the drawing itself is shared with. For an update, the
part of that forward behind the decoder: output embeddings, and the scaling or capping of logits.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from midflight.engines.local.decoding import draw, first_nodes
from midflight.engines.local.grammar import Masks
from midflight.engines.local.rows import Node, Row
from midflight.engines.local.support import FAULTS


@torch.inference_mode()
def generate_plain(model: Any, masks: Masks, rows: list[Row]) -> None:
    """Fill `ids`, `logprobs`, `forced` and `finish` of each row."""
    prompts = list(dict.fromkeys(row.prompt for row in rows))
    for place, node in first_nodes(rows, masks, prompts):
        _follow(model, masks, node, list(prompts[place]), None)


def _follow(model: Any, masks: Masks, node: Node, ids: list[int], past: Any) -> None:
    """Draw until every row of `node` has ended, or its request is gone.

    `ids` are what the model was not fed, `past` its state.
    Behind a state tokens go in one by one: recurrent models take no more. One that gives no state is fed all again.
    """
    while True:
        node.leave()
        if node.done:
            return
        ids, node.pending = ids + node.pending, []
        pieces = [ids] if past is None else [[token] for token in ids]
        for piece in pieces:
            output = model(input_ids=torch.tensor([piece], device=model.device), cache=past, use_cache=True)
            past = getattr(output, "cache", None)
        ids = ids if past is None else []
        children = [child for _, child in draw(output.logits[:, -1].float(), [node], masks)]
        for child in children[1:]:
            _follow(model, masks, child, list(ids), copy.deepcopy(past))
        node = children[0]


def logits_of(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [n, vocabulary] that the model's own forward makes of its decoder's last hidden states [n, width]."""
    decoder = model.base_model
    ids = torch.zeros((1, len(hidden)), dtype=torch.long, device=hidden.device)
    with torch.no_grad():
        output = type(decoder(input_ids=ids[:, :1], use_cache=False))
    decoder.forward = lambda *_, **__: output(last_hidden_state=hidden[None])
    try:
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0]
    finally:
        del decoder.forward
    return logits


@torch.no_grad()
def gives_hidden(model: Any) -> bool:
    """Whether the logits of a token follow from the decoder's last hidden state of it alone, by `logits_of`."""
    ids = torch.tensor([[3, 5, 7]], device=next(model.parameters()).device) % model.config.vocab_size
    try:
        whole = model(input_ids=ids, use_cache=False).logits[0].float()
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        parts = torch.cat([logits_of(model, one[None]) for one in hidden]).float()
    except FAULTS:
        return False
    gap = float((parts - whole).abs().max() / whole.abs().max())
    return gap <= (1e-4 if model.dtype == torch.float32 else 5e-2)
