"""Translation of SkyPilot's exceptions, told apart by their types, never by their texts."""

from typing import Any

from services.common.redaction import redact
from services.launcher.backends.ports import (
    BackendError,
    BackendUnreachable,
    CapacityError,
    SetupError,
    StartLostError,
)

_NO_SERVER = (
    "SkyPilot's API server cannot be asked ({error}); start one with `sky api start`, or name it in"
    " SKYPILOT_API_SERVER_ENDPOINT"
)
_NO_ANSWER = "SkyPilot's API server has no answer ({error}); it is asked again"
_NO_REPLY = "SkyPilot's API server has not answered for {limit_s:g} s; it is asked again"

# The server was restarted under the request, or takes none at present: what came of it is not
# known.
_UNHEARD = ("RequestInterruptedError", "ServerTemporarilyUnavailableError")
# It broke over the request, or could not reach what it needed: a cloud, a machine, its own part of
# that, its database.
_PASSING = (
    *("CloudError", "ClusterStatusFetchingError", "FetchClusterInfoError", "NetworkError"),
    *("SkyletInternalError", "SkyletUnavailableError"),
)
# No wish causes these: a worker of SkyPilot's server is broken. One whose request was cancelled in
# the middle of an import stays so ("'LazyImport' object is not callable"); the others are not.
_BROKEN = (TypeError, AttributeError, NameError, LookupError, ImportError)


def question_error(types: Any, error: Exception) -> BackendUnreachable:
    """Return the error for a question that failed for whatever reason: its answer is not known.

    `types` is SkyPilot's module of exceptions."""
    servers = _is_from_server(error) or _is_any_of(types, error, *_UNHEARD, *_PASSING)
    text = _NO_ANSWER if servers else _NO_SERVER
    return BackendUnreachable(text.format(error=_brief_text(error)))


def timeout_error(limit_s: float) -> BackendUnreachable:
    """Return the error for a question that had no answer in time."""
    return BackendUnreachable(_NO_REPLY.format(limit_s=limit_s))


def submission_error(types: Any, error: Exception) -> BackendError | BackendUnreachable:
    """Return the error that says what became of a submission."""
    said = _brief_text(error)
    if _is_any_of(types, error, "ResourcesUnavailableError"):
        history: Any = error
        # Without a history nobody was asked: no such machine is on any list.
        known = bool(history.failover_history) and not history.no_failover
        return (CapacityError if known else BackendError)(said)
    if _is_any_of(types, error, "CommandFailureException", "ClusterSetUpError"):
        return SetupError(said)
    if _is_any_of(types, error, "RequestCancelled"):
        return StartLostError("its start was cancelled")
    if _is_any_of(types, error, *_UNHEARD):
        return BackendUnreachable(_NO_ANSWER.format(error=said))
    if _is_any_of(types, error, *_PASSING):
        return StartLostError(said)
    if isinstance(error, (RuntimeError, OSError)):
        if not _is_from_server(error):
            # The connection is lost, or the server and with it the request.
            return BackendUnreachable(_NO_SERVER.format(error=said))
        # A machine that nobody can log in to, or SkyPilot's own part of it failed; what it could
        # not reach, it may reach next time.
        return (SetupError if isinstance(error, RuntimeError) else CapacityError)(said)
    # What is left is about the request itself, and SkyPilot says so in many types.
    broken = type(error) is Exception or isinstance(error, _BROKEN)
    return (StartLostError if broken and _is_from_server(error) else BackendError)(said)


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
    # It may repeat the task that it is about; some say nothing.
    text = redact(" ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__
