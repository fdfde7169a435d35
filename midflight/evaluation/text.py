"""Plain text for reports: tables of columns, and numbers."""

from __future__ import annotations

from collections.abc import Sequence

from midflight.evaluation.statistics import Estimate


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Columns two spaces apart under a rule; the first `left` columns are flush left, the others flush right."""
    widths = [max(len(row[column]) for row in (headers, *rows)) for column in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        placed = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(placed).rstrip()

    return "\n".join([line(headers), "  ".join("-" * width for width in widths), *(line(row) for row in rows)])


def percent(share: float) -> str:
    """A share of 1 as per cent with one decimal."""
    return f"{100 * share:.1f}"


def interval(estimate: Estimate | None) -> str:
    """`71.2 [65.0, 77.1]`, or a dash where there is nothing to estimate."""
    if estimate is None:
        return "-"
    return f"{percent(estimate.mean)} [{percent(estimate.low)}, {percent(estimate.high)}]"


def points(before: float, after: float) -> str:
    """The change between two shares in percentage points, signed."""
    return f"{100 * (after - before):+.1f}"
