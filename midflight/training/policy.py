"""The policy: a causal model with an optional LoRA adapter, its reference, and the way its weights reach a sampler.

With LoRA one backbone serves the policy (adapter on), the reference and the frozen modules (adapter off). Without, the
reference is a frozen copy. In 16 bits, where steps as small as a rate would be lost in rounding, the adapter is float32
and beside the weights (`engines/local/beside.py`), and without one all weights have float32 masters (`masters.py`).
Invariant: after `sync` the sampler's version rises, its prefix cache is empty, and a probe of fixed tokens agrees with
the trainer's weights, and has moved with them.
"""

from __future__ import annotations

import asyncio
import copy
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from peft import LoraConfig as PeftLora
from peft import get_peft_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from midflight.engines.local import LoadedModel, LocalEngine, beside
from midflight.errors import UserError
from midflight.training.adapted import adapted
from midflight.training.masters import Masters

if TYPE_CHECKING:
    from midflight.engines.vllm import VllmEngine

ADAPTER = "default"
MOVED = 1e-4
"""A change of the trainer's log-probs that the sampler's have to show, whatever they may differ by."""
SHOWN = 0.1
"""The share of it that they have to show at least: rounding takes some of it, never nearly all."""


class SyncError(RuntimeError):
    """The sampler's weights are not the trainer's after a sync."""


class Policy:
    """The model that trains. `causal` is the transformers model whose forward gives the policy's logits.

    Raises:
        UserError: an adapter on maps of this model would be lost in the rounding of its dtype.
    """

    def __init__(self, loaded: LoadedModel, *, lora: tuple[int, float] | None, reference: bool, seed: int) -> None:
        self.base_name = loaded.name
        self.tokenizer = loaded.tokenizer
        self.device = loaded.device
        self._probed: WeakKeyDictionary[object, tuple[torch.Tensor, torch.Tensor]] = WeakKeyDictionary()
        self._frozen = copy.deepcopy(loaded.model) if reference and lora is None else None
        coarse = loaded.model.dtype != torch.float32
        self._masters: Masters | None = None
        if lora is None:
            self.peft = None
            self.causal = loaded.model.requires_grad_(True)
            if coarse:
                self._masters = Masters(self.causal, beside.merge(self.causal))
        else:
            torch.manual_seed(seed)
            rank, alpha = lora
            settings = PeftLora(
                r=rank,
                lora_alpha=alpha,  # type: ignore[arg-type]
                target_modules="all-linear",
                task_type="CAUSAL_LM",
            )
            self.peft = get_peft_model(loaded.model, settings)
            self.causal = self.peft.get_base_model()
        self.causal.eval()  # no dropout: the trainer's distribution is the sampler's
        self._layers: dict[str, Any] = {
            name: part for name, part in self.causal.named_modules() if isinstance(part, LoraLayer)
        }
        self._apart = coarse and lora is not None
        for name, layer in self._layers.items():
            if self._apart and not isinstance(layer.get_base_layer(), torch.nn.Linear):
                dtype = str(loaded.model.dtype).removeprefix("torch.")
                raise UserError(
                    f"model.dtype = {dtype}: {name} is a {type(layer.get_base_layer()).__name__}, in whose weights the "
                    "adapter's steps would be lost by rounding; set model.dtype=float32, or model.lora=null"
                )

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that train, all of them float32."""
        if self._masters is not None:
            return list(self._masters.of.values())
        return [parameter for parameter in self.causal.parameters() if parameter.requires_grad]

    def settle(self) -> None:
        """Let `causal` follow its parameters; to be called after each optimizer step."""
        if self._masters is not None:
            self._masters.settle()

    @property
    def frozen_model(self) -> Any:
        """The module `frozen` yields; outside that context an adapter on it may be on."""
        return self.causal if self._frozen is None else self._frozen

    @contextmanager
    def frozen(self) -> Iterator[Any]:
        """The reference model: the backbone with the adapter off, or the frozen copy."""
        if self.peft is not None:
            with self.peft.disable_adapter():
                yield self.causal
        elif self._frozen is not None:
            yield self._frozen
        else:
            raise RuntimeError("this policy was made without a reference model")

    @contextmanager
    def scoring(self, sampler: Any) -> Iterator[Any]:
        """The model to compute losses on: `sampler`, a model `write` wrote, with gradients that reach the adapter.

        Without an adapter, or with one on maps other than `torch.nn.Linear` (GPT-2's), it is the policy's own.
        """
        layers = self._layers
        if layers and all(isinstance(layer.get_base_layer(), torch.nn.Linear) for layer in layers.values()):
            with adapted(sampler, layers) as model:
                yield model
        else:
            yield self.causal

    @torch.no_grad()
    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and value of every weight as a plain model has it, an adapter that is not beside them added in."""
        done: set[str] = set()
        for name, layer in self._layers.items():  # of a linear map, or around a module of experts for one parameter
            which = getattr(layer, "parameter_name", "weight")
            done.add(_plain(f"{name}.{which}"))
            if not self._apart:
                yield (
                    _plain(f"{name}.{which}"),
                    getattr(layer.get_base_layer(), which) + layer.get_delta_weight(ADAPTER),
                )
        for name, value in self.causal.state_dict().items():
            if _plain(name) not in done and ".lora_" not in name:
                yield _plain(name), value

    @torch.no_grad()
    def write(self, model: Any) -> None:
        """Put the policy's weights into a plain model, which in 16 bits gets the adapter beside its own.

        Raises:
            SyncError: the model has weights that the policy has not.
        """
        written = set()
        if self._apart:
            for name, layer in self._layers.items():
                beside.put(model.get_submodule(name), layer.get_base_layer(), *beside.factors(layer))
                written |= {f"{name}.weight", f"{name}.bias", f"{name}.down"}
        else:
            beside.merge(model)
        target = dict(model.named_parameters()) | dict(model.named_buffers())
        for name, value in self._weights():
            if name in target and name not in written:
                target[name].copy_(value)
                written.add(name)
        missing = {name for name, _ in model.named_parameters()} - written
        if missing:
            raise SyncError(f"sync left {len(missing)} weights of the sampler stale, first {min(missing)}")

    @contextmanager
    def _as_sampled(self) -> Iterator[Any]:
        """`causal`, computing as what `write` wrote does, also where its adapter is beside the weights."""
        with ExitStack() as restored:
            for layer in self._layers.values() if self._apart else ():
                base = layer.get_base_layer()
                layer.forward = partial(_beside, base, *beside.factors(layer))
                restored.callback(layer.__dict__.pop, "forward")
            yield self.causal

    def sync(self, engine: LocalEngine, version: int, *, bound: float = 1e-4) -> float:
        """Put the policy's weights into the sampler and prove it.

        Returns:
            The largest difference of the probe's log-probs.

        Raises:
            SyncError: it exceeds `bound`, a weight was left stale, or the sampler's log-probs stayed where they were
                when the trainer's moved.
        """
        self.write(engine.model)
        engine.set_version(version)
        return self.probe(engine, bound)

    def sync_server(self, engine: VllmEngine, folder: Path, version: int, *, bound: float = 1e-4) -> float:
        """The same for a server that reads adapters from `folder`, which keeps the newest.

        Raises:
            SyncError: as `sync`.
            EngineGaveUp: the server does not take the adapter.
        """

        async def swap() -> list[float]:
            await engine.swap(adapter, version)
            return await engine.probe(self._probe_ids())

        adapter = folder / f"v{version}"
        shutil.rmtree(folder, ignore_errors=True)
        adapter.mkdir(parents=True)
        self.save(adapter)
        return self._compare(engine, torch.tensor(asyncio.run(swap())), bound)

    def probe(self, engine: LocalEngine, bound: float) -> float:
        """Compare log-probs of fixed ids between trainer and sampler; see `sync`."""
        return self._compare(engine, engine.probe(self._probe_ids()), bound)

    def _probe_ids(self) -> list[int]:
        return [(index * 7919 + 13) % int(self.causal.config.vocab_size) for index in range(24)]

    @torch.no_grad()
    def _compare(self, sampler: object, theirs: torch.Tensor, bound: float) -> float:
        """Are log-probs `theirs` those of the present weights? Within `bound`, and of none that came before.

        The bound alone would take an adapter that is not applied for one that is as long as it does little. So each
        probe is also compared with that of older weights, which a sampler that still has them repeats.
        """
        ids = self._probe_ids()
        tokens = torch.tensor([ids], device=self.device)
        with self._as_sampled() as model:
            logits = model(input_ids=tokens).logits[0, :-1].float()
        ours = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].cpu()
        gap = float((ours - theirs).abs().max())
        if not gap <= bound:
            raise SyncError(f"probe after sync: sampler and trainer log-probs differ by {gap:.3g}, bound {bound:.3g}")
        earlier = self._probed.setdefault(sampler, (ours, theirs))
        moved, shown = (float((now - then).abs().max()) for now, then in zip((ours, theirs), earlier, strict=True))
        if moved > MOVED:
            if shown < SHOWN * moved:
                raise SyncError(
                    f"probe after sync: the sampler still has older weights: its log-probs moved by {shown:.3g} where "
                    f"the trainer's moved by {moved:.3g}"
                )
            self._probed[sampler] = (ours, theirs)
        return gap

    def save(self, folder: Path) -> None:
        """Write the adapter (PEFT's format) or the full model (transformers' format) into `folder`, in float32."""
        if self.peft is not None:
            self.peft.peft_config[ADAPTER].base_model_name_or_path = self.base_name
            state = get_peft_model_state_dict(self.peft, save_embedding_layers=False)
            save_file({name: value.contiguous() for name, value in state.items()}, folder / "adapter_model.safetensors")
            self.peft.peft_config[ADAPTER].save_pretrained(str(folder))
        else:
            self.causal.save_pretrained(folder, state_dict=None if self._masters is None else self._masters.state())
        self.tokenizer.save_pretrained(folder)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        if self.peft is not None:
            set_peft_model_state_dict(self.peft, load_file(folder / "adapter_model.safetensors"))
        else:
            state: dict[str, torch.Tensor] = {}
            for shard in sorted(folder.glob("*.safetensors")):
                state |= load_file(shard)
            missing, unexpected = self.causal.load_state_dict(state, strict=False)
            tied = set(getattr(self.causal, "_tied_weights_keys", None) or ())
            if set(missing) - tied or unexpected:
                raise ValueError(f"checkpoint {folder} does not fit the model: {missing[:1]} {unexpected[:1]}")
            if self._masters is not None:
                self._masters.load(state)


def _plain(name: str) -> str:
    """The name that a weight below LoRA layers has in a plain model."""
    return name.replace(".base_layer", "")


def _beside(base: Any, down: torch.Tensor, up: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    weight, downs = beside.joined(base, down, up)
    return beside.product(x, weight, base.bias, downs)
