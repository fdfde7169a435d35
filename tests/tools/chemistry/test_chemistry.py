"""Chemistry on real molecules, with values from the literature, and on input that is none."""

from __future__ import annotations

import asyncio
import csv
from pathlib import Path
from typing import Any

import pytest

from midflight.errors import GivenUp, UserError
from midflight.tools import ErrorKind, Tool, ToolResult, make_toolset
from midflight.tools.chemistry.molecules import MEASURED_LOGP, logp

pytest.importorskip("rdkit")

ASPIRIN = "CC(=O)Oc1ccccc1C(=O)O"


def made(name: str, **options: Any) -> Tool:
    found = make_toolset([name], {name: options}).get(name)
    assert found is not None
    return found


def ask(name: str, smiles: str, seconds: float = 60.0, **options: Any) -> ToolResult:
    return asyncio.run(made(name, **options).call({"smiles": smiles}, seconds))


def test_the_properties_of_aspirin() -> None:
    lines = dict(line.split(": ") for line in ask("molecular_properties", ASPIRIN).text.splitlines())
    assert lines == {
        "canonical SMILES": "CC(=O)Oc1ccccc1C(=O)O",
        "formula": "C9H8O4",
        "molecular weight": "180.16 g/mol",
        "exact mass": "180.0423",
        "formal charge": "0",
        "heavy atoms": "13",
        "hydrogen bond donors": "1",
        "hydrogen bond acceptors": "3",
        "rotatable bonds": "2",
        "rings": "1, aromatic 1",
        "fraction of sp3 carbons": "0.11",
        "topological polar surface": "63.60 square angstrom",
        "Crippen logP": "1.31",
        "molar refractivity": "44.71",
        "QED": "0.550",
        "rule of five violations": "0",
    }


def test_a_fat_breaks_the_rule_of_five_where_it_does() -> None:
    fat = "CCCCCCCCCCCCCCCCCC(=O)OCC(OC(=O)CCCCCCCCCCCCCCCCC)COC(=O)CCCCCCCCCCCCCCCCC"
    assert "rule of five violations: 2" in ask("molecular_properties", fat).text


def test_logp_is_a_plain_number_near_what_is_measured() -> None:
    assert ask("predict_logp", ASPIRIN).text == "1.3101"
    with open(MEASURED_LOGP, encoding="utf-8") as text:
        known = [(row["smiles"], float(row["logp"])) for row in csv.DictReader(text)]
    assert len(known) == 48 and len({smiles for smiles, _ in known}) == 48
    errors = [abs(logp(smiles) - value) for smiles, value in known]
    assert sum(errors) / len(errors) < 0.5  # a wrong structure or value in the file would show here
    assert max(errors) < 1.6


def test_what_is_known_of_similar_molecules() -> None:
    lines = ask("compare_to_known", "OC(=O)c1ccccc1OC(C)=O", count=2).text.splitlines()
    assert lines[0] == "similarity | name | logp | smiles"
    assert lines[1] == "1.000 (the same molecule) | aspirin | 1.19 | CC(=O)Oc1ccccc1C(=O)O"
    assert lines[2].split(" | ")[1:3] == ["salicylic acid", "2.26"] and len(lines) == 3
    assert float(lines[2].split(" | ")[0]) < 1


def test_a_set_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "set.csv"
    file.write_text("SMILES,melting point\nCCO,-114\nCO,-98\n")
    result = ask("compare_to_known", "CCCO", file=str(file), count=1)
    assert result.text.splitlines() == ["similarity | melting point | smiles", "0.556 | -114 | CCO"]
    file.write_bytes(b"\xef\xbb\xbfsmiles,name,note\r\n\r\nCCO,\r\nCO,methanol,,\r\n")  # a mark, an empty line, commas
    result = ask("compare_to_known", "CCO", file=str(file), count=1)
    assert result.text.splitlines() == ["similarity | name | note | smiles", "1.000 (the same molecule) |  |  | CCO"]
    with pytest.raises(UserError, match="no such file"):
        made("compare_to_known", file=str(tmp_path / "none.csv"))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"structure\nCCO\n", ": has no column smiles"),
        (b"", ": has no column smiles"),
        (b"smiles,name\n", ": has no rows"),
        (b"smiles,name\nCCO,ethanol\nCO,methanol,extra\n", ", line 3: 3 fields for 2 columns"),
        (b'smiles,name\nCCO,"eth\nanol"\nxx,-98\n', ", line 4: 'xx' is not a SMILES that can be read; write one "),
        (b"smiles,name\nCCO,ethanol\nC,m\xe9thane\n", ", line 3: is not UTF-8; save it as that"),
        (b"smil\xe9s,name\nCCO,ethanol\n", ", line 1: is not UTF-8; save it as that"),
        (b"smiles,name\nCCO," + b"x" * 200_000, ", line 2: field larger than field limit (131072)"),
        (b"smiles," + b"x" * 200_000, ", line 1: field larger than field limit (131072)"),
        (b"smiles,name\n,ethanol\n", ", line 2: '' is not a SMILES that can be read; write one "),
    ],
)
def test_what_is_wrong_in_a_set_is_told_at_the_start(data: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "set.csv"
    file.write_bytes(data)
    with pytest.raises(UserError) as caught:
        made("compare_to_known", file=str(file))
    assert f"agent.tool_options.compare_to_known.file: {file}{said}" in str(caught.value)


@pytest.mark.parametrize("data", [b"smiles\nxx\n", b"\xff", None])
def test_a_set_that_breaks_later_is_not_the_planners_error(data: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "set.csv"
    file.write_text("smiles\nCCO\n")
    tool = made("compare_to_known", file=str(file))
    if data is None:
        file.unlink()
    else:
        file.write_bytes(data)
    with pytest.raises(GivenUp, match="^compare_to_known: .*set.csv"):
        asyncio.run(tool.call({"smiles": "CCO"}, 60.0))


@pytest.mark.parametrize("smiles", ["aspirin", "C1CC", " ", "C(C)(C)(C)(C)C", "c1cccc1"])
@pytest.mark.parametrize("name", ["molecular_properties", "predict_logp", "compare_to_known"])
def test_what_is_no_molecule_is_told(name: str, smiles: str) -> None:
    result = ask(name, smiles)
    assert result.error is ErrorKind.TOOL_ERROR and "\n" not in result.text


def test_a_molecule_that_is_too_large_is_told() -> None:
    assert "the molecule has 501 heavy atoms; at most 500 are computed" in ask("predict_logp", "C" * 501).text
