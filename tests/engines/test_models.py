"""Which models take Midflight's attention, and what loading says."""

import logging
from types import SimpleNamespace

import pytest

from midflight.engines.local.models import ModelError, load
from midflight.engines.local.support import unlike


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, None),
        ({"sliding_window": None}, None),
        ({"sliding_window": 4096, "use_sliding_window": False}, None),
        ({"sliding_window": 4096, "layer_types": ["full_attention", "full_attention"]}, None),
        ({"sliding_window": 4096}, "a sliding window"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "full_attention, sliding_attention"),
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
    ],
)
def test_models_whose_layers_do_not_all_attend_to_the_whole_past_are_named(config, said):
    reason = unlike(SimpleNamespace(**config))
    assert reason == "" if said is None else said in reason


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError) as caught:
        load("nobody/none-of-this-name", device="cpu")
    assert str(caught.value) == (
        "model.name=nobody/none-of-this-name: not in the Hub's cache, and the Hub cannot be reached; give smollm2-135m "
        "or a folder, or go online (with HF_HUB_OFFLINE=1 the Hub is not tried)"
    )
    assert not logging.getLogger("huggingface_hub.utils._http").isEnabledFor(logging.WARNING)


def test_what_transformers_says_is_cut_between_words(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise OSError("one two " * 100)

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", refuse)
    with pytest.raises(ModelError, match=r"cannot be loaded; .* \(one two .* (one|two) \.\.\.\)$") as caught:
        load(str(tmp_path), device="cpu")
    assert len(str(caught.value)) < 450 + len(str(tmp_path))
