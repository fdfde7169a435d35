"""Which models are refused, since Midflight's attention would be wrong for them without a word."""

from types import SimpleNamespace

import pytest

from midflight.engines.local.models import _unsupported


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
        ({"final_logit_softcapping": 30.0}, "caps its logits"),
    ],
)
def test_models_whose_layers_do_not_all_attend_to_the_whole_past_are_named(config, said):
    reason = _unsupported(SimpleNamespace(**config))
    assert reason is None if said is None else said in reason
