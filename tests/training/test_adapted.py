"""The adapter's gradients through merged weights, against those of the unmerged form."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from midflight.training.adapted import adapted


class Maps(nn.Module):
    """Two linear maps, one with a bias."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5, dtype=dtype)
        self.second = nn.Linear(5, 3, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.parametrize(("dtype", "gap"), [(torch.float32, 1e-6), (torch.bfloat16, 0.05)])
def test_gradients_equal_the_unmerged_ones(dtype: torch.dtype, gap: float) -> None:
    torch.manual_seed(0)
    plain = Maps(dtype)
    settings = LoraConfig(r=2, lora_alpha=6, target_modules=["first", "second"])
    policy = get_peft_model(Maps(dtype), settings)  # type: ignore[arg-type]
    base: Any = policy.get_base_model()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.normal_(std=0.5)
        for name in ("first", "second"):
            layer, into = getattr(base, name), getattr(plain, name)
            into.weight.copy_(layer.weight + layer.get_delta_weight("default"))
            if into.bias is not None:
                into.bias.copy_(layer.bias)
    plain.requires_grad_(False)
    x = torch.randn(4, 7, 6, dtype=dtype)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    base(x).float().square().sum().backward()
    expected = [parameter.grad.clone() for parameter in trained if parameter.grad is not None]
    for parameter in trained:
        parameter.grad = None
    with adapted(plain, {"first": base.first, "second": base.second}) as model:
        model(x).float().square().sum().backward()
    assert len(expected) == len(trained) == 4
    for parameter, theirs in zip(trained, expected, strict=True):
        assert parameter.grad is not None
        assert float((parameter.grad - theirs).norm() / theirs.norm()) < gap
    assert "forward" not in vars(plain.first)


def test_the_model_is_left_as_it_was_when_the_loss_fails() -> None:
    base: Any = get_peft_model(Maps(torch.float32), LoraConfig(r=2, target_modules=["first"])).get_base_model()
    plain = Maps(torch.float32)
    with pytest.raises(KeyError), adapted(plain, {"first": base.first}):
        assert "forward" in vars(plain.first)
        raise KeyError
    assert "forward" not in vars(plain.first)
