"""Calls that fetch the outcome of an order."""

from flotilla_tinker.api.calls import ApiAnswer, ApiRefusal, ClientCall, Front, answer_json
from flotilla_tinker.types import Failure, Pending, Result
from flotilla_tinker.wire.bodies import CancelBody, FutureBody
from flotilla_tinker.wire.json_bodies import read_json
from flotilla_tinker.wire.samples import PROTOBUF, read_policy_spans
from flotilla_tinker.work.desk_errors import BadOrder

# A client may first make room for a larger result.
_LARGE_BYTES = 256 * 2**10


async def retrieve_future(front: Front, call: ClientCall) -> ApiAnswer:
    """Wait for an outcome. The status 408 means: ask again."""
    given = read_json(call.body, FutureBody)
    outcome = await front.desk.wait(call.tenant, given.request_id, front.poll_s)
    match outcome:
        case Pending():
            state = outcome.queue_state
            return answer_json(
                408, type="try_again", request_id=given.request_id, queue_state=state
            )
        case Failure():
            return answer_json(error=outcome.message, category=outcome.category)
        case Result():
            if given.allow_metadata_only and len(outcome.body) > _LARGE_BYTES:
                size = len(outcome.body)
                return answer_json(status="complete_metadata", response_payload_size=size)
            if outcome.content_type == PROTOBUF and not _takes_protobuf(call.accept):
                raise ApiRefusal(406, f"this result has arrays: send Accept: {PROTOBUF}")
            return ApiAnswer(200, outcome.body, outcome.content_type, outcome.headers)


def _takes_protobuf(accept: str) -> bool:
    return PROTOBUF in accept or "*/*" in accept


async def cancel_future(front: Front, call: ClientCall) -> ApiAnswer:
    await front.desk.cancel(call.tenant, read_json(call.body, CancelBody).request_id)
    return answer_json()


async def policy_spans(front: Front, call: ClientCall) -> ApiAnswer:
    """Return the weights that sampled each token of a finished sample; only this server has this
    call."""
    request_id = call.path["request_id"]
    outcome = await front.desk.wait(call.tenant, request_id, 0.0)
    if not isinstance(outcome, Result) or outcome.content_type != PROTOBUF:
        raise BadOrder(f"{request_id!r} is no finished sample")
    return answer_json(request_id=request_id, sequences=read_policy_spans(outcome))
