"""Which models take Midflight's attention, and what loading says."""

import logging
import time
from types import SimpleNamespace

import pytest

from midflight.engines.local.models import ModelError, load
from midflight.engines.local.support import unlike
from midflight.engines.vllm import load_tokenizer


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


@pytest.mark.parametrize("answers", [True, False])
def test_a_hub_is_asked_once_whether_it_answers_and_then_its_cache_alone(monkeypatch, tmp_path, answers):
    asked, read = [], []

    def head(url, timeout):
        asked.append(url)
        if not answers:
            raise ConnectionError("no route")

    def from_pretrained(source, **how):
        read.append((source, how))
        return "tokenizer"

    monkeypatch.setattr("huggingface_hub.get_session", lambda: SimpleNamespace(head=head))
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", from_pretrained)
    assert load_tokenizer("some/name", "strong") == "tokenizer"
    assert read == [("some/name", {} if answers else {"local_files_only": True})]
    assert asked == ["https://huggingface.co"]
    load_tokenizer(str(tmp_path), "strong")
    assert read[1] == (str(tmp_path), {}) and len(asked) == 1


def test_a_tokenizer_that_is_nowhere_is_one_line_at_once(monkeypatch, capfd):
    def head(url, timeout):
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.get_session", lambda: SimpleNamespace(head=head))
    began = time.monotonic()
    with pytest.raises(ModelError) as caught:
        load_tokenizer("nobody/none-of-this-name", "strong")
    assert str(caught.value) == (
        "engines.strong.tokenizer=nobody/none-of-this-name: not in the Hub's cache, and the Hub cannot be reached; "
        "give smollm2-135m or a folder, or go online (with HF_HUB_OFFLINE=1 the Hub is not tried)"
    )
    assert time.monotonic() - began < 10 and capfd.readouterr().err == ""
