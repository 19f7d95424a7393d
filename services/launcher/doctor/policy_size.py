"""Size of a run's policy."""

from services.launcher.doctor.findings import FindingError, fail
from services.launcher.doctor.model_size import ModelSize, UnknownModelSizeError, read_model_size
from services.launcher.doctor.policy_files import fetch_policy_folder
from services.launcher.doctor.run_context import RunContext


async def measure_policy(context: RunContext) -> ModelSize:
    """Return the size of the policy's model. Raises FindingError, NotApplicableError."""
    try:
        return read_model_size(await fetch_policy_folder(context))
    except UnknownModelSizeError as error:
        raise FindingError(fail, str(error), "fetch the model again") from error
