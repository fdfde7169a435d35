"""What RDKit says of a molecule given as SMILES. These functions run in a worker process.

Descriptors: rdkit.Chem.Descriptors; logP and molar refractivity by Wildman and Crippen (doi 10.1021/ci990307l); TPSA by
Ertl (doi 10.1021/jm000942e); QED by Bickerton (doi 10.1038/nchem.1243); rule of five by Lipinski.
"""

from __future__ import annotations

import csv
import io
from functools import cache
from pathlib import Path
from typing import Any

from midflight.errors import GivenUp
from midflight.tools.base import ToolError

MOST_ATOMS = 500
MEASURED_LOGP = Path(__file__).with_name("measured_logp.csv")
"""Measured octanol-water logP of 48 common molecules; docs/licences.md says what they were compared with."""
RADIUS, BITS = 2, 2048


def molecule(smiles: str) -> Any:
    """The RDKit molecule.

    Raises:
        ToolError: no SMILES, or too large.
    """
    from rdkit import Chem, RDLogger

    RDLogger.DisableLog("rdApp.*")
    text = smiles.strip()
    found = Chem.MolFromSmiles(text) if text else None
    if found is None or found.GetNumAtoms() == 0:
        raise ToolError(f"{text!r} is not a SMILES that can be read; write one such as CC(=O)O for acetic acid")
    if found.GetNumAtoms() > MOST_ATOMS:
        raise ToolError(f"the molecule has {found.GetNumAtoms()} heavy atoms; at most {MOST_ATOMS} are computed")
    return found


def properties(smiles: str) -> str:
    """Descriptors of a molecule, one a line."""
    from rdkit import Chem
    from rdkit.Chem import QED, Crippen, Descriptors, Lipinski, rdMolDescriptors

    found = molecule(smiles)
    weight, logp = Descriptors.MolWt(found), Crippen.MolLogP(found)
    donors, acceptors = Lipinski.NumHDonors(found), Lipinski.NumHAcceptors(found)
    broken = sum((weight > 500, logp > 5, donors > 5, acceptors > 10))
    lines = {
        "canonical SMILES": Chem.MolToSmiles(found),
        "formula": rdMolDescriptors.CalcMolFormula(found),
        "molecular weight": f"{weight:.2f} g/mol",
        "exact mass": f"{Descriptors.ExactMolWt(found):.4f}",
        "formal charge": str(Chem.GetFormalCharge(found)),
        "heavy atoms": str(found.GetNumHeavyAtoms()),
        "hydrogen bond donors": str(donors),
        "hydrogen bond acceptors": str(acceptors),
        "rotatable bonds": str(Lipinski.NumRotatableBonds(found)),
        "rings": f"{rdMolDescriptors.CalcNumRings(found)}, aromatic {rdMolDescriptors.CalcNumAromaticRings(found)}",
        "fraction of sp3 carbons": f"{rdMolDescriptors.CalcFractionCSP3(found):.2f}",
        "topological polar surface": f"{rdMolDescriptors.CalcTPSA(found):.2f} square angstrom",
        "Crippen logP": f"{logp:.2f}",
        "molar refractivity": f"{Crippen.MolMR(found):.2f}",
        "QED": f"{QED.qed(found):.3f}",
        "rule of five violations": str(broken),
    }
    return "\n".join(f"{name}: {value}" for name, value in lines.items())


def logp(smiles: str) -> float:
    """Wildman and Crippen's estimate, to 4 digits."""
    from rdkit.Chem import Crippen

    return round(float(Crippen.MolLogP(molecule(smiles))), 4)


def nearest(smiles: str, file: str, count: int) -> str:
    """The `count` molecules of `file` that are most like the one given, with what is known of each.

    Likeness is Tanimoto's, of Morgan fingerprints (radius 2, 2048 bits).

    Raises:
        ToolError: no SMILES.
        GivenUp: the file cannot be read; it could when the tool was made.
    """
    from rdkit import Chem
    from rdkit.DataStructs import BulkTanimotoSimilarity

    found = molecule(smiles)
    try:
        rows, fingerprints, same_as = _known(file, Path(file).stat().st_mtime_ns)
    except (OSError, ToolError) as error:
        raise GivenUp(f"compare_to_known: {error}") from error
    similar = BulkTanimotoSimilarity(_fingerprint(found), fingerprints)
    own = Chem.MolToSmiles(found)
    ranked = sorted(range(len(rows)), key=lambda number: (same_as[number] != own, -similar[number], number))[:count]
    columns = [column for column in rows[0] if column != "smiles"]
    lines = [" | ".join(["similarity", *columns, "smiles"])]
    for number in ranked:
        likeness = f"{similar[number]:.3f}" + (" (the same molecule)" if same_as[number] == own else "")
        lines.append(" | ".join([likeness, *(rows[number][column] for column in columns), rows[number]["smiles"]]))
    return "\n".join(lines)


def check(file: str) -> int:
    """The number of molecules in a file.

    Raises:
        ToolError: one of them cannot be read; with file and line.
    """
    return len(_known(file, Path(file).stat().st_mtime_ns)[0])


@cache
def _known(file: str, changed: int) -> tuple[list[dict[str, str]], list[Any], list[str]]:
    """Rows, fingerprints and canonical SMILES of a file as it was at `changed`."""
    from rdkit import Chem

    rows = rows_of(file)
    molecules = []
    for line, row in rows:
        try:
            molecules.append(molecule(row["smiles"]))
        except ToolError as error:
            raise ToolError(f"{file}, line {line}: {error}") from error
    return (
        [row for _, row in rows],
        [_fingerprint(one) for one in molecules],
        [Chem.MolToSmiles(one) for one in molecules],
    )


def rows_of(file: str) -> list[tuple[int, dict[str, str]]]:
    """The line where each row of a CSV ends, and its values by column in lower case; one that is left out is empty.

    Raises:
        ToolError: it cannot be read, or has no column `smiles`; with file and line.
    """
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise ToolError(f"{file}: {error.strerror}") from error
    try:
        text = data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ToolError(f"{file}, line {line}: is not UTF-8; save it as that") from error
    read = csv.reader(io.StringIO(text, newline=""))
    found = []
    try:
        columns = [name.strip().lower() for name in next(read, [])]
        if "smiles" not in columns:
            raise ToolError(f"{file}: has no column smiles")
        for values in read:
            if "".join(values[len(columns) :]).strip():
                raise ToolError(f"{file}, line {read.line_num}: {len(values)} fields for {len(columns)} columns")
            if values:
                row = dict.fromkeys(columns, "") | dict(zip(columns, map(str.strip, values), strict=False))
                found.append((read.line_num, row))
    except csv.Error as error:
        raise ToolError(f"{file}, line {read.line_num}: {error}") from error
    if not found:
        raise ToolError(f"{file}: has no rows")
    return found


def _fingerprint(found: Any) -> Any:
    from rdkit.Chem.rdFingerprintGenerator import GetMorganGenerator

    return GetMorganGenerator(radius=RADIUS, fpSize=BITS).GetFingerprint(found)
