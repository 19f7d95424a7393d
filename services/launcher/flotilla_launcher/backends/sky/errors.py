"""Translation of SkyPilot's exceptions by their types, never by their texts."""

from typing import Any

from flotilla_common.text.redaction import redact
from flotilla_launcher.backends.ports import (
    BackendError,
    BackendUnreachable,
    CapacityError,
    SetupError,
    StartLostError,
)

_NO_SERVER = (
    "SkyPilot's API server does not answer ({error}); start one with `sky api start`, or name it in"
    " SKYPILOT_API_SERVER_ENDPOINT"
)
_NO_ANSWER = "SkyPilot's API server has no answer ({error}); the launcher retries"
_NO_REPLY = "SkyPilot's API server has not answered for {limit_s:g} s; the launcher retries"

# The server was restarted during the request, or accepts none at present: the result is unknown.
_UNHEARD = ("RequestInterruptedError", "ServerTemporarilyUnavailableError")
# The server failed on the request, or did not reach a cloud, a machine, its own agent there, or its
# database.
_PASSING = (
    *("CloudError", "ClusterStatusFetchingError", "FetchClusterInfoError", "NetworkError"),
    *("SkyletInternalError", "SkyletUnavailableError"),
)
# No request causes these: a worker of SkyPilot's server is broken. One that was cancelled during an
# import stays broken ("'LazyImport' object is not callable"); the other workers are not.
_BROKEN = (TypeError, AttributeError, NameError, LookupError, ImportError)


def question_error(types: Any, error: Exception) -> BackendUnreachable:
    """Return the error for a failed question, the answer to which is unknown. `types` is SkyPilot's
    module of exceptions."""
    servers = _is_from_server(error) or _is_any_of(types, error, *_UNHEARD, *_PASSING)
    text = _NO_ANSWER if servers else _NO_SERVER
    return BackendUnreachable(text.format(error=_brief_text(error)))


def timeout_error(limit_s: float) -> BackendUnreachable:
    """Return the error for a question that had no answer in time."""
    return BackendUnreachable(_NO_REPLY.format(limit_s=limit_s))


def submission_error(types: Any, error: Exception) -> BackendError | BackendUnreachable:
    """Return the error that describes the result of a submission."""
    reason = _brief_text(error)
    if _is_any_of(types, error, "ResourcesUnavailableError"):
        history: Any = error
        # Without a history no cloud was tried: no catalog has such a machine.
        known = bool(history.failover_history) and not history.no_failover
        return (CapacityError if known else BackendError)(reason)
    if _is_any_of(types, error, "CommandFailureException", "ClusterSetUpError"):
        return SetupError(reason)
    if _is_any_of(types, error, "RequestCancelled"):
        return StartLostError("its start was cancelled")
    if _is_any_of(types, error, *_UNHEARD):
        return BackendUnreachable(_NO_ANSWER.format(error=reason))
    if _is_any_of(types, error, *_PASSING):
        return StartLostError(reason)
    if isinstance(error, (RuntimeError, OSError)):
        if not _is_from_server(error):
            # The connection is lost, or the server and with it the request.
            return BackendUnreachable(_NO_SERVER.format(error=reason))
        # The machine refuses logins, or SkyPilot's own part of it failed; an unreachable service
        # may be reachable next time.
        return (SetupError if isinstance(error, RuntimeError) else CapacityError)(reason)
    # The remaining types concern the request itself.
    broken = type(error) is Exception or isinstance(error, _BROKEN)
    return (StartLostError if broken and _is_from_server(error) else BackendError)(reason)


def _is_any_of(types: Any, error: Exception, *names: str) -> bool:
    """Return whether the error is of one of these types. Not every version of SkyPilot has all
    of them."""
    found = (getattr(types, name, None) for name in names)
    return isinstance(error, tuple(kind for kind in found if kind is not None))


def _is_from_server(error: BaseException) -> bool:
    """Return whether the server raised the error and the client only re-raised it: with the
    server's stack trace, or as a plain exception where SkyPilot's client does not know its
    type."""
    return hasattr(error, "stacktrace") or type(error) is Exception


def _brief_text(error: BaseException) -> str:
    # The text may repeat the task, or be empty.
    text = redact(" ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__
