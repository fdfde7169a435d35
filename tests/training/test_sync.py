"""The probe after each sync: the sampler has the trainer's weights, also where the bound would let older ones pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from midflight.engines.local import LocalEngine, load
from midflight.training.policy import Policy, SyncError

pytestmark = pytest.mark.model

LOOSE = 10.0
STALE = r"the sampler still has older weights: its log-probs moved by 0 where the trainer's moved by 0\.\d"


@torch.no_grad()
def stir(policy: Policy, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


@pytest.fixture
def policy(model: Path) -> Policy:
    return Policy(load(str(model)), lora=(4, 8.0), reference=False, seed=0)


def test_weights_that_stay_behind_are_found_below_the_bound(policy: Policy, model: Path) -> None:
    sampler = LocalEngine(load(str(model)), chat_template=False)
    assert policy.sync(sampler, 1, bound=LOOSE) < 1e-4
    stir(policy, 0.02)
    with pytest.raises(SyncError, match=STALE):
        policy.probe(sampler, LOOSE)
    assert policy.sync(sampler, 2, bound=LOOSE) < 1e-4
    assert policy.probe(sampler, LOOSE) < 1e-4  # weights that did not move have nothing to show
    sampler.close()


class Server:
    """Takes every adapter, and applies those that it is not told to ignore."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.deaf = policy, False
        self.said: list[float] = []

    async def swap(self, folder: Path, version: int) -> None:
        if not self.deaf:
            self.said = []

    async def probe(self, ids: list[int]) -> list[float]:
        if not self.said:
            with torch.no_grad():
                logits = self.policy.causal(input_ids=torch.tensor([ids])).logits[0, :-1]
            self.said = logits.log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()
        return self.said


def test_a_server_that_ignores_an_adapter_is_found_as_soon_as_its_steps_add_up(policy: Policy, tmp_path: Path) -> None:
    server: Any = Server(policy)
    policy.sync_server(server, tmp_path / "adapters", 0, bound=LOOSE)
    stir(policy, 0.02)
    policy.sync_server(server, tmp_path / "adapters", 1, bound=LOOSE)
    server.deaf = True
    version = 1
    with pytest.raises(SyncError, match=r"its log-probs moved by 0 where the trainer's moved by 0.0001\d*$"):
        while version < 60:
            version += 1
            stir(policy, 4e-6)
            policy.sync_server(server, tmp_path / "adapters", version, bound=LOOSE)
    assert 2 < version < 60  # not one of the steps shows alone
