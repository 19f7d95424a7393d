"""From a call to its answer, whatever happens: errors become statuses that the SDK acts on.

It sends a call again after 408, 409, 429 and 5xx, and gives up after any other."""

import secrets

from flotilla_common.telemetry.log import get_logger
from flotilla_tinker.api.calls import (
    ApiAnswer,
    ApiRefusal,
    ClientCall,
    Front,
    Handler,
    answer_json,
)
from flotilla_tinker.wire.wire_error import WireError
from flotilla_tinker.work.desk_errors import (
    Away,
    BadOrder,
    Conflict,
    DeskError,
    GoneError,
    NotFound,
    TooLarge,
    TooMuch,
)

_STATUSES: dict[type[DeskError], int] = {
    BadOrder: 400,
    # Not 409, which the SDK sends again for minutes.
    Conflict: 422,
    NotFound: 404,
    GoneError: 410,
    TooLarge: 413,
    TooMuch: 429,
    Away: 503,
}
_log = get_logger(__name__)


async def answer_call(handle: Handler, front: Front, call: ClientCall) -> ApiAnswer:
    """Answer a call. Never raises, except for a cancellation."""
    try:
        return await handle(front, call)
    except WireError as error:
        return refuse(400, str(error))
    except ApiRefusal as error:
        return refuse(error.status, str(error))
    except DeskError as error:
        return _refuse_by_desk(error)
    except Exception:  # noqa: BLE001 (a defect of ours must not end a client's run: it tries again)
        error_id = secrets.token_hex(6)
        _log.exception("a call failed", error_id=error_id)
        return refuse(503, f"this server made a mistake; its log has it as {error_id}")


def refuse(status: int, message: str, headers: dict[str, str] | None = None) -> ApiAnswer:
    """Return a refusal."""
    answer = answer_json(status, detail=message)
    return ApiAnswer(status, answer.body, headers=headers or {})


def _refuse_by_desk(error: DeskError) -> ApiAnswer:
    status = next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), 400)
    wait_s = error.retry_after_s if isinstance(error, TooMuch) else 0
    headers = {"Retry-After": f"{wait_s:.0f}"} if wait_s >= 1 else {}
    return refuse(status, str(error), headers)
