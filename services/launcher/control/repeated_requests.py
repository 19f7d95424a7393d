"""Repeated StartRun requests: the same id names the same run."""

from grpc import StatusCode

from services.launcher.control.admission import refusal_error

# Stored in place of the digest of a request that must not begin a run.
CANCELLED_DIGEST = "cancelled"


def resolve_repeat(request_id: str, known: tuple[str, str], digest: str) -> str:
    """Return the run that an earlier StartRun with this id began. Refuse an id that another
    request has used."""
    known_digest, run_id = known
    if known_digest == CANCELLED_DIGEST:
        message = f"request_id {request_id!r} was cancelled before it began a run"
        raise refusal_error(StatusCode.ALREADY_EXISTS, "REQUEST_CONFLICT", message)
    if known_digest != digest:
        message = f"request_id {request_id!r} was used for another request, of run {run_id}"
        raise refusal_error(StatusCode.ALREADY_EXISTS, "REQUEST_CONFLICT", message)
    return run_id
