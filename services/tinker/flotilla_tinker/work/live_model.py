"""A model that clients train: what the journal has of it, and its place in the work."""

import asyncio
from dataclasses import dataclass, replace

from flotilla_tinker.store.record_rows import ModelRow
from flotilla_tinker.work.model_line import ModelLine


@dataclass(slots=True, eq=False)
class LiveModel:
    """A model of an open session."""

    row: ModelRow
    line: ModelLine
    # Of the trainer when it was last seen to hold the model.
    held_in_era: int = -1
    # Bytes of operations that would have to be repeated.
    journaled: int = 0
    # No gradient is accumulated, as far as is known.
    is_clean: bool = False
    # The order that is carried out.
    task: "asyncio.Task[None] | None" = None

    @property
    def model_id(self) -> str:
        return self.row.record.model_id

    @property
    def label(self) -> str:
        """Name of its present weights in samples."""
        return f"{self.model_id}@{self.row.record.updates}"

    @property
    def newest_operation(self) -> int:
        """The trainer's number of the newest operation."""
        return self.row.operations - self.row.numbering


def advance(row: ModelRow, *, next_seq: int, operations: int = 0, updates: int = 0) -> ModelRow:
    """Return a model after an order."""
    record = replace(row.record, last_seq=next_seq - 1, updates=row.record.updates + updates)
    return replace(row, record=record, next_seq=next_seq, operations=row.operations + operations)
