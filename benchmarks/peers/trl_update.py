"""One optimizer step of TRL's GRPOTrainer on given rows, as often as asked: python trl_update.py SPEC.json.

Runs in an environment of its own, which has trl, peft and torch and not Midflight. Generation and rewards are replaced
by the rows; what is timed is the training step from its begin to its end: compute_loss and backward of each
micro-batch, clipping, the optimizer. TRL knows no grammar mask, pads all rows to the longest prompt and the longest
completion, and is given no gradient checkpointing (its default recomputes the forward). The rate is 0.

SPEC: `model` (a folder), `rank`, `alpha`, `rows` (each [prompt ids, completion ids, advantage]), `micro_batch`,
`dtype` (float32, or bfloat16: weights in float32 under autocast, TRL's own default), `completions_only`, `epsilon`,
`max_grad_norm`, `temperature`. With `completions_only` the head scores the completions alone, as TRL 1.16 has it do on
GPUs; as shipped, it scores all of the prompts too on a CPU. Prints a line of JSON with versions and the padded tokens
when it is ready, and then, for each line it reads, does one step and prints a line with its `seconds`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

import torch
import transformers
import trl
import trl.trainer.utils
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class RowsTrainer(GRPOTrainer):
    """Trains `micro_batches`, in order, at every step."""

    micro_batches: list[dict[str, torch.Tensor]]

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, torch.Tensor]:
        return self.micro_batches[self._step % len(self.micro_batches)]


class Paced(TrainerCallback):
    """Waits for a line before each step and answers how long it took; leaves at the end of input."""

    def __init__(self, answers: TextIO) -> None:
        self.answers = answers
        self.began = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if not sys.stdin.readline():
            raise SystemExit
        self.began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.answers.write(json.dumps({"seconds": time.perf_counter() - self.began}) + "\n")
        self.answers.flush()


def padded(rows: list[list[Any]], pad: int) -> dict[str, torch.Tensor]:
    """The rows as TRL lays them out: prompts padded before, completions behind."""
    prompts, completions = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    ids = torch.full((len(rows), prompts + completions), pad)
    mask = torch.zeros_like(ids)
    for number, (prompt, completion, _) in enumerate(rows):
        start = prompts - len(prompt)
        ids[number, start : prompts + len(completion)] = torch.tensor(prompt + completion)
        mask[number, start : prompts + len(completion)] = 1
    return {
        "prompt_ids": ids[:, :prompts],
        "prompt_mask": mask[:, :prompts],
        "completion_ids": ids[:, prompts:],
        "completion_mask": mask[:, prompts:],
        "advantages": torch.tensor([row[2] for row in rows]),
    }


def main(file: Path) -> None:
    spec = json.loads(file.read_text(encoding="utf-8"))
    if spec["completions_only"]:
        if not hasattr(trl.trainer.utils, "_use_triton"):
            raise SystemExit(f"trl {trl.__version__} has another head than 1.16: install trl==1.16.0")
        trl.trainer.utils._use_triton = lambda device: True  # there it only decides which positions are scored
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints goes to standard error
    rows, size = spec["rows"], spec["micro_batch"]
    steps = math.ceil(len(rows) / size)
    with tempfile.TemporaryDirectory() as folder:
        trainer = RowsTrainer(
            model=spec["model"],
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=Dataset.from_dict({"prompt": ["unused"]}),
            peft_config=LoraConfig(
                r=spec["rank"], lora_alpha=spec["alpha"], target_modules="all-linear", task_type="CAUSAL_LM"
            ),
            callbacks=[Paced(answers)],
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=spec["dtype"] == "bfloat16",
                model_init_kwargs={"dtype": "float32"},
                per_device_train_batch_size=size,
                gradient_accumulation_steps=steps,
                num_generations=size * steps,
                max_steps=10**6,
                learning_rate=0.0,
                weight_decay=0.0,
                lr_scheduler_type="constant",
                beta=0.0,
                loss_type="grpo",
                epsilon=spec["epsilon"],
                temperature=spec["temperature"],
                max_grad_norm=spec["max_grad_norm"],
                gradient_checkpointing=False,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
        )
        whole = padded(rows, trainer.processing_class.pad_token_id)
        parts = zip(*(tensor.split(size) for tensor in whole.values()), strict=True)
        trainer.micro_batches = [dict(zip(whole, part, strict=True)) for part in parts]
        tokens = sum(whole[name].numel() for name in ("prompt_ids", "completion_ids"))
        versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
        answers.write(json.dumps({**versions, "padded_tokens": tokens}) + "\n")
        answers.flush()
        trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
