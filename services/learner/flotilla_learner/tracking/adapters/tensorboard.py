"""Metrics as TensorBoard event files, without torch or TensorFlow."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2 as _event_pb2
from tensorboard.compat.proto import summary_pb2 as _summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from flotilla_common.rpc.errors import ConfigError
from flotilla_learner.ports import TrackedRun
from flotilla_learner.types import Histogram

# Generated without annotations.
event_pb2: Any = _event_pb2
summary_pb2: Any = _summary_pb2


class TensorboardTracker:
    """Writes to one folder, a new file for each start of a run. Implements `Tracker`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Untyped: the package has no annotations.
        self._writer: Any = None

    def open_run(self, run: TrackedRun) -> None:
        """Begin a file, and make readers discard the steps from here on in earlier files.

        Raises ConfigError if the folder is not writable."""
        try:
            self._writer = EventFileWriter(str(self._folder))
        except OSError as error:
            raise ConfigError(
                f"learner.tracking: cannot write {self._folder}: {error}; make it writable"
            ) from error
        if run.resumed:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add_event(run.logged_step + 1, session_log=start)

    def log_metrics(
        self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        values = [
            summary_pb2.Summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
        ]
        values += [
            summary_pb2.Summary.Value(tag=name, histo=_histogram_to_proto(shape))
            for name, shape in histograms.items()
        ]
        self._add_event(step, summary=summary_pb2.Summary(value=values))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _add_event(self, step: int, **what: Any) -> None:
        self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=step, **what))
        # Buffered points would be lost with the process.
        self._writer.flush()


def _histogram_to_proto(shape: Histogram) -> Any:
    """Convert to TensorBoard's form: `bucket[i]` values up to `bucket_limit[i]`.

    Moments are computed from bin centres."""
    centres = [(low + high) / 2 for low, high in zip(shape.edges, shape.edges[1:], strict=False)]
    return summary_pb2.HistogramProto(
        min=shape.edges[0],
        max=shape.edges[-1],
        num=sum(shape.counts),
        sum=_dot_product(centres, shape.counts),
        sum_squares=_dot_product([centre * centre for centre in centres], shape.counts),
        bucket_limit=shape.edges,
        bucket=[0, *shape.counts],
    )


def _dot_product(values: Sequence[float], counts: Sequence[int]) -> float:
    return float(sum(v * n for v, n in zip(values, counts, strict=True)))
