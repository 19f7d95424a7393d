"""Files that keep what agents did and what the trainer computed of it: `[learner.dumps]`."""

from services.common.config import ConfigModel


class DumpsConfig(ConfigModel):
    """What a run keeps of its episodes beside the journal."""

    # Write anything at all.
    enabled: bool = True
