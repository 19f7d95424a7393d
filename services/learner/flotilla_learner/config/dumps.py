"""Files that record episodes and the trainer's values for their tokens: `[learner.dumps]`."""

from pydantic import Field

from flotilla_common.spec.config import ConfigModel
from flotilla_common.spec.number_ranges import Count, Steps


class DumpsConfig(ConfigModel):
    """Episode files that a run keeps beside the journal."""

    # Write dumps at all.
    enabled: bool = True
    # Steps between dumps of training episodes; every evaluation is dumped.
    every: Steps = 1
    # Newest steps whose token statistics and episodes stay in the run's folder, and whose tokens
    # stay in the journal, of at most 200 groups.
    keep: Count = 20
    # Bytes of pictures that are written for one step or evaluation; further ones stay in the
    # journal alone.
    picture_bytes: int = Field(default=256 * 2**20, ge=2**20, le=2**40)
    # Also upload the files if `learner.checkpoint.remote` names a store.
    remote: bool = True
