"""Running an agent over questions, and what the runs say: intervals, statistics, reports, plots."""

from midflight.evaluation.intervals import bootstrap_mean
from midflight.evaluation.plots import write_plots
from midflight.evaluation.report import (
    Example,
    comparison_table,
    pick_example,
    render_example,
    render_report,
    render_trajectory,
    write_report,
)
from midflight.evaluation.runner import evaluate
from midflight.evaluation.statistics import (
    Estimate,
    EvaluationResult,
    Scored,
    error_rates,
    summarise,
    tool_shares,
)

__all__ = [
    "Estimate",
    "EvaluationResult",
    "Example",
    "Scored",
    "bootstrap_mean",
    "comparison_table",
    "error_rates",
    "evaluate",
    "pick_example",
    "render_example",
    "render_report",
    "render_trajectory",
    "summarise",
    "tool_shares",
    "write_plots",
    "write_report",
]
