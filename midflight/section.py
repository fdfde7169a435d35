"""The base of a recipe's sections."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

MOST_SECONDS = 1e8
"""Three years. Far longer times are more than the system's timers take."""


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, numbers are finite, and nothing changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
