"""One run, one folder: SQLite for trajectories and turns, JSON lines for metrics."""

from midflight.store.codec import ValueNotStorable
from midflight.store.database import Store, StoreError
from midflight.store.entries import NewTrajectory, PhaseLine, RunRecord, TrajectoryLine, TrajectoryRecord
from midflight.store.folder import RunFolder
from midflight.store.metrics import MetricsError, MetricsWriter, read_metrics

__all__ = [
    "MetricsError",
    "MetricsWriter",
    "NewTrajectory",
    "PhaseLine",
    "RunFolder",
    "RunRecord",
    "Store",
    "StoreError",
    "TrajectoryLine",
    "TrajectoryRecord",
    "ValueNotStorable",
    "read_metrics",
]
