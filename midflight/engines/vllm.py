"""A vLLM server as an engine that can train: token ids in and out, and the log-prob of each drawn token.

Invariant: a generation is exactly what the server drew, from exactly the weights that were last put there: ids and
log-probs are of one length, and an answer that another adapter gave is no answer. Log-probs are those after
temperature and grammar, which a server started with `--logprobs-mode processed_logprobs` gives; `check` finds out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from midflight.engines.base import (
    BudgetSpent,
    EngineGaveUp,
    FinishReason,
    GenerateRequest,
    Generation,
    Message,
    PromptTooLong,
)
from midflight.engines.http import Client, Ledger, Malformed, NotThere, Prices, PromptRefused, said_tokens
from midflight.engines.local.grammar import GrammarError, Masks
from midflight.engines.local.models import pretrained, read_tokenizer
from midflight.engines.local.prompts import PromptEncoder
from midflight.engines.served import GUIDANCE, Endpoint, ServedEngine
from midflight.engines.vllm_answers import drawn_tokens, only_choice, served_names, shown, stopped_at
from midflight.errors import UserError
from midflight.seeds import derive

T = TypeVar("T")

RESET_ATTEMPTS = 20
"""A prefix cache cannot be emptied while a request holds blocks of it; there are 0.1 s between attempts."""
UNCHANGED = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Else a model's generation_config.json would bend the distribution, which the trainer does not know of."""
MOST_IDS = 2**24
"""More than any vocabulary has: the bound where the model's own is not known."""
FORCED_TOLERANCE = 1e-3
"""By so much the log-prob of a token that a grammar forces may be off 0."""
_FORCED = GUIDANCE + 'start: "a"\n'
_NOWHERE = "/midflight/no-adapter-is-here"
_ADAPTERS = "--enable-lora and --max-lora-rank of at least model.lora.rank"


@dataclass
class _Weights:
    """What the server draws from, shared by all views of an engine."""

    model: str
    version: int = 0
    generated_tokens: int = 0


class VllmEngine(ServedEngine):
    """An engine with ids on a server. `tokenizer` is that of the model.

    `check` proves that the server has what training needs, `swap` changes the weights, `probe` shows them. `vocabulary`
    is how many ids the model has, for who knows it: an answer with another id is no answer.

    Raises:
        UserError: `endpoint.api` is `chat`, and the tokenizer has no chat template that takes the modules' messages.
    """

    def __init__(
        self,
        name: str,
        client: Client,
        endpoint: Endpoint,
        tokenizer: Any,
        *,
        ledger: Ledger | None = None,
        prices: Prices | None = None,
    ) -> None:
        super().__init__(name, endpoint, "grammar", ledger, prices)
        if endpoint.api == "chat":
            _check_template(tokenizer, name)
        self.client = client
        self.tokenizer = tokenizer
        self.vocabulary = MOST_IDS
        self._encoder = PromptEncoder(tokenizer, chat_template=endpoint.api == "chat")
        self._masks = Masks(tokenizer, len(tokenizer))
        self._weights = _Weights(endpoint.model)
        self._ends = frozenset({tokenizer.eos_token_id} - {None})

    @property
    def weights_version(self) -> int:
        return self._weights.version

    @property
    def generated_tokens(self) -> int:
        """Drawn by all views of this engine."""
        return self._weights.generated_tokens

    def count_tokens(self, text: str) -> int:
        return len(self._encoder.encode_text(text))

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `Engine.generate`."""
        if request.json_schema is not None:
            raise EngineGaveUp(f"{self.name}: takes a grammar, not a JSON schema")
        sampling = request.sampling
        prompt = request.prompt_ids or tuple(i for part in self._encoder.encode(request.messages) for i in part)
        if len(prompt) + sampling.max_tokens > self.context_length:
            raise PromptTooLong(
                f"{self.name}: {len(prompt)} prompt tokens + max_tokens {sampling.max_tokens} exceed context_length "
                f"{self.context_length}"
            )
        weights = _Weights(self._weights.model, self._weights.version)
        body: dict[str, Any] = {
            "model": weights.model,
            "prompt": prompt,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_tokens,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
            **UNCHANGED,
        }
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if request.grammar is not None:
            body["structured_outputs"] = {"grammar": GUIDANCE + request.grammar}

        async def read(answer: Any) -> Generation:
            took, drew = said_tokens(answer)
            try:
                drawn = await self._read(answer, request, prompt, weights)
            except (Malformed, EngineGaveUp, asyncio.CancelledError):
                self._count(took or 0, drew or 0)
                raise
            self._count(len(prompt), max(drew or 0, len(only_choice(answer)["token_ids"])), requests=1)
            self._weights.generated_tokens += len(drawn.ids)
            return drawn

        tokens = len(prompt) + sampling.max_tokens
        try:
            return await self.client.ask("/completions", body, read, tokens=tokens, before=self._before)
        except PromptRefused as error:
            if error.too_long:
                raise PromptTooLong(str(error)) from None
            raise
        except NotThere:
            if self.endpoint.model != weights.model == self._weights.model:
                lost = "the server has lost the adapter it was given: was it restarted? go on with --resume"
                raise EngineGaveUp(f"{self.name}: {lost}") from None
            raise

    async def _read(
        self, answer: Any, request: GenerateRequest, prompt: Sequence[int], weights: _Weights
    ) -> Generation:
        """Raises Malformed where the answer is not of this request, or not whole."""
        choice = only_choice(answer)
        if answer.get("model") != weights.model:
            raise Malformed(f"weights of {shown(answer.get('model'))}, not of {weights.model!r}")
        if choice.get("prompt_token_ids") not in (None, list(prompt)):
            raise Malformed("another prompt's ids")
        ids, logprobs = drawn_tokens(choice)
        most = request.sampling.max_tokens
        if max(ids, default=0) >= self.vocabulary:
            raise Malformed("a token id outside the model's vocabulary")
        if not 1 <= len(ids) <= most:
            raise Malformed(f"{len(ids)} tokens where 1 to {most} were asked for")
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length"):
            raise EngineGaveUp(f"{self.name}: ended for the reason {shown(reason)}")
        finish = FinishReason(reason)
        forced: tuple[bool, ...] = (False,) * len(ids)
        if request.grammar is not None:
            # a mask of the whole vocabulary a token
            ids, forced, whole = await asyncio.to_thread(self._forced, request.grammar, ids)
            if whole:  # there was no room for an end token behind it
                finish = FinishReason.STOP
            if any(only and value < -FORCED_TOLERANCE for value, only in zip(logprobs, forced, strict=False)):
                raise Malformed("a choice where its grammar leaves none: the server draws under another mask")
        ended = finish is FinishReason.STOP and bool(ids) and ids[-1] in {*self._ends, stopped_at(choice)}
        return Generation(
            text=self.tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False),
            finish_reason=finish,
            prompt_ids=tuple(prompt),
            ids=ids,
            logprobs=tuple(0.0 if only else value for value, only in zip(logprobs, forced, strict=False)),
            forced=forced,
            weights_version=weights.version,
            sampling=request.sampling,
            grammar=request.grammar,
        )

    def _forced(self, grammar: str, ids: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[bool, ...], bool]:
        """The ids up to the grammar's end, where it left no choice, and whether they come to its end.

        vLLM draws an end token behind that end.
        """
        try:
            matcher = self._masks.start(grammar)
        except GrammarError as error:  # of another version of llguidance than the server's
            raise EngineGaveUp(f"{self.name}: the server took a grammar that cannot be read here: {error}") from None
        forced: list[bool] = []
        for position, token in enumerate(ids):
            if matcher.is_stopped():
                return ids[:position], tuple(forced), True
            mask = self._masks.allowed(matcher)
            if token >= len(mask) or not mask[token]:
                raise Malformed(f"a token at position {position} that its grammar forbids")
            forced.append(int(np.count_nonzero(mask)) == 1)
            matcher.consume_token(token)
        return ids, tuple(forced), matcher.is_stopped()

    async def check(self) -> None:
        """Prove that the server offers what training needs.

        Raises:
            UserError: it does not; the line names the flag to start it with.
            EngineGaveUp: it does not answer.
        """
        served = await self.client.ask("/models", None, served_names, method="GET")
        if self.endpoint.model not in served:
            raise UserError(
                f"engines.{self.name}.model = {self.endpoint.model}: the server has {', '.join(served) or 'none'}; "
                "set one of these, or start it with --served-model-name"
            )
        key = f"engines.{self.name}.base_url = {self.client.base_url}: the server"
        prompt = tuple(self._encoder.encode_text("The letter: "))
        body = {
            "model": self.endpoint.model,
            "prompt": prompt,
            "max_tokens": 4,
            "temperature": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
            "structured_outputs": {"grammar": _FORCED},
        }
        try:
            logprobs = await self._checked(body, key)
        except BudgetSpent as error:
            raise UserError(f"{error}; the check of the server takes more, so set a larger one") from None
        if max(map(abs, logprobs), default=1.0) > FORCED_TOLERANCE:
            raise UserError(
                f"{key} gives log-probs from before grammar and temperature; start it with "
                "--logprobs-mode processed_logprobs"
            )
        try:
            await self._load(f"{self.endpoint.model}-none", _NOWHERE)
        except NotThere as error:
            if _NOWHERE not in str(error):  # else it loads adapters, and has found none there
                raise UserError(
                    f"{key} takes no adapters while it runs; start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its "
                    f"environment, {_ADAPTERS}"
                ) from None
        except EngineGaveUp as error:
            if _ADAPTERS not in str(error):
                raise
            raise UserError(f"{key} loads no adapters: {error}") from None
        try:
            await self.client.tell("//reset_prefix_cache", None)
        except NotThere:
            raise UserError(
                f"{key} cannot empty its prefix cache; start it with VLLM_SERVER_DEV_MODE=1 in its environment"
            ) from None

    async def _checked(self, body: dict[str, Any], key: str) -> tuple[float, ...]:
        """The log-probs of a completion under a grammar; raises as `check`."""

        def read(answer: Any) -> tuple[float, ...]:
            return drawn_tokens(only_choice(answer))[1]

        try:
            return await self._apart("check", body, read, bounded=True)
        except EngineGaveUp as error:
            problem = error
        if _refused(problem):  # for its grammar, if the rest of it is taken
            plain = {name: value for name, value in body.items() if name != "structured_outputs"}
            await self._apart("check", plain, only_choice, bounded=True)
            raise UserError(
                f"{key} takes no Lark grammars; start it with "
                f'--structured-outputs-config \'{{"backend": "guidance"}}\' ({problem})'
            )
        if "the answer has" not in str(problem):
            raise problem
        raise UserError(f"{key} gives no token ids or log-probs; use vLLM 0.10.2 or newer ({problem})")

    async def swap(self, adapter: Path, version: int) -> None:
        """Draw from the adapter in a folder that the server can read, and from nothing that was computed before it.

        Its name on the server holds where the folder lies, so that runs which share a server do not share adapters.

        Raises:
            EngineGaveUp: the server does not take it.
        """
        before = self._weights.model
        run = derive(adapter.resolve().parent) % 16**8
        name = f"{self.endpoint.model}-{run:08x}-v{version}"
        if name == before:
            await self._unload(name)
        try:
            await self._load(name, str(adapter.resolve()))
        except EngineGaveUp as error:
            if "already been loaded" not in str(error):
                raise
            await self._unload(name)  # an earlier process left it
            await self._load(name, str(adapter.resolve()))
        self._weights.model, self._weights.version = name, version
        if before not in (self.endpoint.model, name):
            await self._unload(before)
        for _ in range(RESET_ATTEMPTS):
            if "false" not in (await self.client.tell("//reset_prefix_cache", None)).lower():
                return
            await asyncio.sleep(0.1)
        raise EngineGaveUp(f"{self.name}: the server does not empty its prefix cache: its requests do not end")

    async def _load(self, name: str, folder: str) -> None:
        try:
            await self.client.tell("/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        except EngineGaveUp as error:
            if _refused(error):
                raise EngineGaveUp(f"{error}; was the server started with {_ADAPTERS}?") from None
            raise

    async def _unload(self, name: str) -> None:
        with contextlib.suppress(NotThere):  # done by an attempt whose answer was lost
            await self.client.tell("/unload_lora_adapter", {"lora_name": name})

    async def probe(self, ids: Sequence[int]) -> list[float]:
        """Log-probs [len(ids) - 1] of fixed ids under the weights that draw, to compare with the trainer's.

        They are counted, but no spent budget stops them: they end what was paid for, an update.
        """
        model = self._weights.model
        body = {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}

        def read(answer: Any) -> list[float]:
            found = only_choice(answer).get("prompt_logprobs")
            if answer.get("model") != model:
                raise Malformed(f"weights of {shown(answer.get('model'))}, not of {model!r}")
            if not isinstance(found, list) or len(found) != len(ids):
                raise Malformed("no log-prob for each token of the prompt")
            try:
                return [float(at[str(token)]["logprob"]) for at, token in zip(found[1:], ids[1:], strict=True)]
            except (KeyError, TypeError, ValueError, OverflowError):
                raise Malformed("no log-prob of a token of the prompt") from None

        return await self._apart("probe", body, read)

    async def _apart(self, module: str, body: dict[str, Any], read: Callable[[Any], T], *, bounded: bool = False) -> T:
        """A completion that no module asks for, counted as if `module` did; `bounded` by the budget or not.

        Raises: as `Client.ask`; BudgetSpent.
        """
        view = self.for_module(module)

        def counted(answer: Any) -> T:
            took, drew = said_tokens(answer)
            try:
                found = read(answer)
            except Malformed:
                view._count(took or 0, drew or 0)
                raise
            prompt, most = len(body["prompt"]), body["max_tokens"]
            view._count(prompt if took is None else took, most if drew is None else drew, requests=1)
            return found

        before = view._before if bounded else view._count_retry
        return await self.client.ask("/completions", body, counted, before=before)


def _check_template(tokenizer: Any, engine: str) -> None:
    fault = "" if tokenizer.chat_template else "the model's tokenizer has no chat template"
    if not fault:
        try:
            PromptEncoder(tokenizer, chat_template=True).encode((Message("system", ("a",)), Message("user", ("b",))))
        except ValueError as error:
            fault = str(error)
    if fault:
        raise UserError(f"engines.{engine}.api = chat: {fault}; set engines.{engine}.api=completions")


def load_tokenizer(name: str, engine: str) -> Any:
    """The tokenizer of `name`: a folder, a Hub name or the embedded model.

    Raises:
        UserError: there is none.
    """
    with pretrained(name, f"engines.{engine}.tokenizer") as (source, where_from):
        return read_tokenizer(source, where_from)


def _refused(error: EngineGaveUp) -> bool:
    """vLLM says 500 too where it cannot do what it is asked."""
    return isinstance(error, PromptRefused) or "HTTP 500" in str(error)
