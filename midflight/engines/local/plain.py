"""Decoding by transformers' own forward, one sequence at a time: for models that Midflight's attention does not fit.

What is drawn, forced and reported is as in `decoding.py`, which the drawing itself is shared with.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from midflight.engines.local.decoding import draw, first_nodes
from midflight.engines.local.grammar import Masks
from midflight.engines.local.rows import Node, Row


@torch.inference_mode()
def generate_plain(model: Any, masks: Masks, rows: list[Row]) -> None:
    """Fill `ids`, `logprobs`, `forced` and `finish` of each row."""
    prompts = list(dict.fromkeys(row.prompt for row in rows))
    for place, node in first_nodes(rows, masks, prompts):
        _follow(model, masks, node, list(prompts[place]), None)


def _follow(model: Any, masks: Masks, node: Node, ids: list[int], past: Any) -> None:
    """Draw until every row of `node` has ended; `ids` are what the model was not fed, `past` its state.

    Behind a state tokens go in one by one: recurrent models take no more. One that gives no state is fed all again.
    """
    while not node.done:
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
