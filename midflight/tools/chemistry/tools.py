"""`molecular_properties`, `predict_logp`, `compare_to_known`: RDKit as tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from midflight.errors import UserError
from midflight.section import MOST_SECONDS
from midflight.tools.base import Tool, ToolError
from midflight.tools.chemistry.molecules import MEASURED_LOGP, check, logp, nearest, properties, rows_of
from midflight.tools.function import tool
from midflight.tools.options import ToolContext, ToolOptions, installed
from midflight.tools.worker import run_in_worker, run_in_worker_now

Smiles = Annotated[str, Field(min_length=1, max_length=2000, description="the molecule, such as CC(=O)O")]


@tool
async def molecular_properties(smiles: Smiles) -> str:
    """weight, formula, hydrogen bonds, polar surface, logP and other properties of a molecule"""
    return await run_in_worker(properties, smiles)


@tool
async def predict_logp(smiles: Smiles) -> float:
    """octanol-water logP of a molecule, estimated from its atoms (Wildman and Crippen)"""
    return await run_in_worker(logp, smiles)


class CompareOptions(ToolOptions):
    cacheable: ClassVar[bool] = False
    paths: ClassVar[tuple[str, ...]] = ("file",)

    file: str | None = None
    """CSV with a column `smiles` and others of what is known (a name, a value); null: measured logP of 48 common
    molecules."""
    count: int = Field(default=5, ge=1, le=100)
    """Molecules that are shown."""
    seconds: float | None = Field(default=60.0, gt=0, le=MOST_SECONDS)

    @property
    def known(self) -> str:
        return str(MEASURED_LOGP if self.file is None else Path(self.file).absolute())

    def missing(self) -> str:
        if not Path(self.known).is_file():
            return f"{self.known}: no such file; give another in agent.tool_options.compare_to_known.file"
        try:
            rows_of(self.known)
        except ToolError as error:
            return f"agent.tool_options.compare_to_known.file: {error}"
        return ""


def compare_to_known(options: CompareOptions, context: ToolContext) -> Tool:
    """The tool within its options.

    Raises:
        UserError: a molecule of the file cannot be read.
    """
    if options.file is not None and not options.missing() and installed("rdkit"):
        try:
            run_in_worker_now(check, options.known)
        except ToolError as error:
            raise UserError(f"agent.tool_options.compare_to_known.file: {error}") from error

    async def compare_to_known(smiles: Smiles) -> str:
        """the known molecules that are most like a molecule, with their measured values"""
        return await run_in_worker(nearest, smiles, options.known, options.count)

    return tool(compare_to_known)
