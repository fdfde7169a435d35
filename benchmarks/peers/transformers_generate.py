"""transformers' `generate` as a peer: left-padded batches of the trajectories that are at the same turn.

It is given its best: no grammar masks, no log-probs, no end token to look for, and batches of calls that need about
as many tokens, which no live rollout could know. A batch goes on until its longest call has its tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from rollout_work import Call, Timing, Workload
from transformers import AutoModelForCausalLM, GenerationConfig


def batches(calls: Sequence[Call], size: int) -> list[list[Call]]:
    """Batches of at most `size` calls that need about as many tokens from prompts of about the same length."""
    ordered = sorted(calls, key=lambda call: (len(call.ids), len(call.prompt)))
    return [ordered[first : first + size] for first in range(0, len(ordered), size)]


def left_padded(prompts: Sequence[Sequence[int]], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask, each [prompts, longest]."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), padding)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids, mask


class TransformersGenerate:
    """A model of transformers with its own attention, in `dtype`. `size` is the most calls in a batch."""

    def __init__(self, folder: str, dtype: str, size: int = 64) -> None:
        self.dtype, self.size = dtype, size
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        ends = self.model.generation_config.eos_token_id
        self.padding = int(ends[0] if isinstance(ends, list) else ends or 0)
        self.model.generation_config = GenerationConfig(pad_token_id=self.padding)  # without an end token

    @torch.inference_mode()
    def run(self, work: Workload) -> Timing:
        """Every wave of `work`, batch by batch.

        Raises:
            RuntimeError: a batch has not as many new tokens as were asked for.
        """
        began = time.perf_counter()
        for batch in (batch for wave in work.waves() for batch in batches(wave, self.size)):
            ids, mask = left_padded([call.prompt for call in batch], self.padding)
            new = max(len(call.ids) for call in batch)
            settings = GenerationConfig(
                max_new_tokens=new, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=self.padding
            )
            drawn = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
            if drawn.shape[1] != ids.shape[1] + new:
                raise RuntimeError(f"generate drew {drawn.shape[1] - ids.shape[1]} tokens, not {new}")
        return Timing(time.perf_counter() - began, work.drawn)
