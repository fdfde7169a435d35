from pathlib import Path

import pytest

from tests.training.tiny import make_byte_model, make_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that tests read only. Its tokens are bytes, so it loads at once."""
    return make_byte_model(tmp_path_factory.mktemp("bytes"), hidden=64, chat=True)


@pytest.fixture(scope="session")
def subwords(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the embedded model's tokenizer and chat template, which take a second at each start."""
    return make_tiny_model(tmp_path_factory.mktemp("subwords"))


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw no plots, which take longer than the rest of a run of a few steps."""
    monkeypatch.setattr("midflight.training.session.write_plots", lambda folder: [])
