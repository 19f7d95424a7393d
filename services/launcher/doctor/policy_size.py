"""Size of a run's policy, or the finding that it is unknown."""

from services.launcher.doctor.findings import Finding, fail
from services.launcher.doctor.model_size import ModelSize, UnknownModelSizeError, read_model_size
from services.launcher.doctor.policy_files import (
    NoPolicyError,
    fetch_policy_folder,
    report_missing_policy,
)
from services.launcher.doctor.run_context import RunContext


async def measure_policy(context: RunContext) -> ModelSize | Finding:
    """Return the size of the policy's model, or the finding that it is unknown."""
    try:
        return read_model_size(await fetch_policy_folder(context))
    except NoPolicyError as error:
        return report_missing_policy(context, error)
    except UnknownModelSizeError as error:
        return fail(str(error), "fetch the model again")
