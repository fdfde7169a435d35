"""Running an agent over questions, and what the runs say: intervals, statistics, reports, plots."""

from midflight.evaluation.credit import GroupValue, TrajectoryCredit, TurnCredit, group_credit, monte_carlo_credit
from midflight.evaluation.intervals import bootstrap_mean, difference, wilson
from midflight.evaluation.plots import write_credit_plot, write_plots
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
    "GroupValue",
    "Scored",
    "TrajectoryCredit",
    "TurnCredit",
    "bootstrap_mean",
    "comparison_table",
    "difference",
    "error_rates",
    "evaluate",
    "group_credit",
    "monte_carlo_credit",
    "pick_example",
    "render_example",
    "render_report",
    "render_trajectory",
    "summarise",
    "tool_shares",
    "wilson",
    "write_credit_plot",
    "write_plots",
    "write_report",
]
