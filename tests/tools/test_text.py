"""Text of foreign origin without its markup."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from midflight.tools.text import without_tags
from midflight.tools.web import literature, providers

ROOT = Path(__file__).resolve().parents[2]


def test_tags_go_and_what_is_none_stays() -> None:
    text = "<b>Peru</b> has 1 < 2 <br/>lakes <a href='x'\n title=y>here</a>"
    assert without_tags(text) == "Peru has 1 < 2 lakes here"
    assert without_tags("a<p>b</p>", " ") == "a b "
    assert providers._plain("a<b>b</b> &lt;x") == "ab <x" and literature._plain("a<p>b <i>c</i></p>d") == "a b c d"


@pytest.mark.parametrize("text", ["'<a' * 500_000", "'<' + 'a' * 1_000_000", "'<' * 1_000_000", "'</' * 500_000"])
def test_a_megabyte_of_open_tags_takes_no_time(text: str) -> None:
    code = "from midflight.tools.web import literature, providers\n"
    code += f"for module in (literature, providers): assert len(module._plain({text})) == len({text})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)  # else it takes hours
