"""The local engine: a transformers model that many trajectories share.

Requests that arrive together are decoded together. One worker thread runs the model, so the event loop stays free;
batches are formed in order of arrival, so a run with the same seeds forms the same batches. With continuous batching a
request joins the running batch, and what shares a forward depends on the clock.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import secrets
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from midflight.engines.base import (
    EngineError,
    EngineGaveUp,
    FinishReason,
    GenerateRequest,
    Generation,
    Message,
    PromptTooLong,
)
from midflight.engines.local.decoding import Arrivals, generate
from midflight.engines.local.grammar import GrammarError, Masks
from midflight.engines.local.models import LoadedModel
from midflight.engines.local.plain import generate_plain
from midflight.engines.local.prefixes import PrefixTree
from midflight.engines.local.prompts import PromptEncoder
from midflight.engines.local.rows import Row
from midflight.engines.local.support import is_ours

_QUIET_TICKS = 8
"""Turns of the event loop without a new request before a batch starts."""
_AWAKE_SECONDS = 0.25
"""The event loop wakes as often during a batch: a signal that comes just as it falls asleep does not wake it."""


_Entry = tuple[Row, GenerateRequest, "asyncio.Future[Generation]"]


class LocalEngine:
    """An `Engine` on a model in this process.

    `exact`, set while a trainer draws, has attention computed in float64 (`batch_invariant.py`). `continuous` admits
    requests into a running batch, and answers each as soon as it has ended. `around` is entered
    for each batch (the frozen modules use it to switch an adapter off).
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        chat_template: bool = True,
        context_length: int = 2048,
        max_batch: int = 64,
        prefix_tokens: int = 8192,
        continuous: bool = False,
        around: Callable[[], Any] | None = None,
    ) -> None:
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.masks = Masks(loaded.tokenizer, int(loaded.model.config.vocab_size))
        self.weights_version = 0
        self.exact = False
        self.generated_tokens = 0
        self._name = loaded.name
        self._encoder = PromptEncoder(loaded.tokenizer, chat_template=chat_template)
        self._context = min(
            context_length, int(getattr(loaded.model.config, "max_position_embeddings", context_length))
        )
        self._max_batch = max_batch
        self._around = around or _nothing
        self._prefixes = PrefixTree(prefix_tokens)
        self._continuous = continuous
        self._queue: deque[_Entry] = deque()
        self._running: dict[int, _Entry] = {}
        self._pump: asyncio.Task[None] | None = None
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="midflight-engine")
        ends = loaded.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        self._stop_ids = frozenset(int(token) for token in [*ends, loaded.tokenizer.eos_token_id] if token is not None)

    @property
    def name(self) -> str:
        return self._name

    @property
    def context_length(self) -> int:
        return self._context

    def count_tokens(self, text: str) -> int:
        return len(self.encode_text(text))

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text, as a part of a prompt has them."""
        return self._encoder.encode_text(text)

    def encode(self, messages: tuple[Message, ...]) -> list[list[int]]:
        """The prompt's segments of ids, as `generate` would build them."""
        return self._encoder.encode(messages)

    async def generate(self, request: GenerateRequest) -> Generation:
        if request.json_schema is not None:
            raise EngineGaveUp("the local engine takes a grammar, not a JSON schema")
        segments = [list(request.prompt_ids)] if request.prompt_ids else self._encoder.encode(request.messages)
        length = sum(map(len, segments))
        if length == 0:
            raise EngineGaveUp("the local engine needs a prompt of at least one token")
        if length + request.sampling.max_tokens > self._context:
            raise PromptTooLong(
                f"prompt of {length} tokens + max_tokens {request.sampling.max_tokens} exceed "
                f"context_length {self._context}"
            )
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(63)
        try:
            if request.grammar:
                self.masks.check(request.grammar)
        except GrammarError as error:
            raise EngineGaveUp(str(error)) from error
        row = Row(segments, dataclasses.replace(request.sampling, seed=seed), request.grammar, self._stop_ids)
        if request.sampling.stop:
            row.spells = partial(self.masks.spells, request.sampling.stop)
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._queue.append((row, request, future))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.get_running_loop().create_task(self._run_batches())
        try:
            return await future
        except asyncio.CancelledError:
            row.gone = True
            raise

    async def _run_batches(self) -> None:
        loop = asyncio.get_running_loop()
        while self._queue:
            waiting = -1
            while waiting != len(self._queue) and len(self._queue) < self._max_batch:
                waiting = len(self._queue)
                for _ in range(_QUIET_TICKS):
                    await asyncio.sleep(0)
            rows: list[Row] = []
            while len(rows) < self._max_batch and self._next() is not None:
                rows.append(self._take())
            if not rows:
                continue
            try:
                decoding = loop.run_in_executor(self._worker, self._decode, rows, loop)
                while not decoding.done():
                    await asyncio.wait([decoding], timeout=_AWAKE_SECONDS)
                decoding.result()
            except Exception as error:  # the boundary: a failed forward is an infrastructure failure of each request
                failed, self._running = list(self._running.values()), {}
                for _, _, future in failed:
                    if not future.done():
                        future.set_exception(EngineError(f"local engine: {type(error).__name__}: {error}"))
            self._settle([row for row, _, _ in self._running.values()])

    def _next(self) -> Row | None:
        """The request to take next; those that were cancelled while they waited fall away."""
        while self._queue and self._queue[0][2].done():
            self._queue.popleft()
        return self._queue[0][0] if self._queue else None

    def _take(self) -> Row:
        entry = self._queue.popleft()
        self._running[id(entry[0])] = entry
        return entry[0]

    def _settle(self, rows: list[Row]) -> None:
        """Answer these requests."""
        for row in rows:
            _, request, future = self._running.pop(id(row))
            self.generated_tokens += len(row.ids)
            if not future.done():
                future.set_result(self._generation(row, request))

    def _decode(self, rows: list[Row], loop: asyncio.AbstractEventLoop) -> None:
        """Runs in the worker; it alone takes from the queue while it does."""

        def ended(rows: list[Row]) -> None:
            loop.call_soon_threadsafe(self._settle, rows)

        arrivals = Arrivals(self._next, self._take, ended, self._max_batch) if self._continuous else None
        with self._around():
            if is_ours(self.model):
                generate(self.model, self._prefixes, self.masks, rows, arrivals, exact=self.exact)
            else:
                generate_plain(self.model, self.masks, rows)

    def _generation(self, row: Row, request: GenerateRequest) -> Generation:
        ended = row.finish is FinishReason.STOP and row.ids[-1] in self._stop_ids
        text = self.tokenizer.decode(row.ids[:-1] if ended else row.ids, skip_special_tokens=False)
        return Generation(
            text=before(text, row.sampling.stop),
            finish_reason=row.finish or FinishReason.LENGTH,
            prompt_ids=row.prompt,
            ids=tuple(row.ids),
            logprobs=tuple(row.logprobs),
            forced=tuple(row.forced),
            supports=tuple(row.supports),
            weights_version=self.weights_version,
            sampling=row.sampling,
            grammar=request.grammar,
        )

    def set_version(self, version: int) -> None:
        """Say that the model's weights changed: the version rises and the prefix tree is emptied."""
        self.weights_version = version
        self.forget()

    def forget(self) -> None:
        """Empty the prefix tree and hand freed memory back to the system.

        Waits for a batch in the making, whose requests may have been cancelled: it uses model and tree to its end.
        """
        self._worker.submit(self._prefixes.clear).result()
        _give_back()

    @torch.inference_mode()
    def probe(self, ids: list[int]) -> torch.Tensor:
        """Log-probs [len(ids) - 1] of fixed ids under the engine's weights, to compare with the trainer's."""
        tokens = torch.tensor([ids], device=self.model.device)
        with self._around():
            logits = self.model(input_ids=tokens).logits[0, :-1].float()
        found: torch.Tensor = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].cpu()
        return found

    def close(self) -> None:
        """Stop the worker thread."""
        self._worker.shutdown(wait=False, cancel_futures=True)


def before(text: str, stop: tuple[str, ...]) -> str:
    """The part of `text` before the stop string that is spelt first; the drawn ids spell it too."""
    ends = [(text.find(one) + len(one), text.find(one)) for one in stop if one in text]
    return text[: min(ends)[1]] if ends else text


def _give_back() -> None:
    """glibc keeps freed memory in pieces too small for later blocks: the process would grow with each phase."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)


@contextmanager
def _nothing() -> Iterator[None]:
    yield
