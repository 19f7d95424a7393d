"""Files that keep what agents did and what the trainer computed of it: `[learner.dumps]`."""

from services.common.config import ConfigModel
from services.common.number_ranges import Count, Steps


class DumpsConfig(ConfigModel):
    """What a run keeps of its episodes beside the journal."""

    # Write anything at all.
    enabled: bool = True
    # Steps between dumps of a step's episodes; evaluations are all dumped.
    every: Steps = 1
    # Newest steps whose token statistics and episodes are kept in the run's folder, and whose
    # tokens stay in the journal, of at most 200 groups.
    keep: Count = 20
    # Upload the files as well, where `learner.checkpoint.remote` names a store.
    remote: bool = True
