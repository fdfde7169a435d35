from pathlib import Path

import pytest

from tests.training.tiny import make_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that tests read only."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))
