"""All routes of the protocol, and what this server refuses of it."""

from dataclasses import dataclass

from flotilla_tinker.api import (
    future_calls,
    listing_calls,
    sampling_calls,
    session_calls,
    training_calls,
)
from flotilla_tinker.api.calls import ApiAnswer, ApiRefusal, ClientCall, Front, Handler
from flotilla_tinker.api.training_calls import passing_over
from flotilla_tinker.wire.loss_batches import read_loss_place

PREFIX = "/api/v1"
_RUN = "/training_runs/{model_id}"
_CHECKPOINT = f"{_RUN}/checkpoints/{{kind}}/{{name}}"


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """A route below PREFIX; parts in braces are named."""

    method: str
    path: str
    handle: Handler
    # Answered without a key.
    is_open: bool = False


def _refuse(message: str) -> Handler:
    async def refuse(front: Front, call: ClientCall) -> ApiAnswer:
        raise ApiRefusal(404, message)

    return refuse


_NO_EXPORT = _refuse(
    "weights are not exported: download the checkpoint's archive,"
    " GET /api/v1/training_runs/MODEL/checkpoints/weights/NAME/archive"
)
_NO_BILLS = _refuse("this server sends no bills")
_NO_LOSSES = _refuse(
    "custom losses do not run on this server: forward_backward_custom computes them in the client"
)
_NO_FLAG = _refuse("this call is not offered; client/config says so")
_NO_PROJECTS = _refuse("this server has no projects and no users, only keys")

ROUTES = (
    # The search begins here: these two are called for every sample.
    ApiRoute("POST", "/retrieve_future", future_calls.retrieve_future),
    ApiRoute("POST", "/asample", sampling_calls.sample),
    ApiRoute("GET", "/healthz", session_calls.healthz, is_open=True),
    ApiRoute("POST", "/client/config", session_calls.client_config),
    ApiRoute("POST", "/client/dynamic_config", session_calls.client_dynamic_config),
    ApiRoute("POST", "/create_session", session_calls.create_session),
    ApiRoute("POST", "/session_heartbeat", session_calls.session_heartbeat),
    ApiRoute("GET", "/sessions", session_calls.list_sessions),
    ApiRoute("GET", "/sessions/{session_id}", session_calls.describe_session),
    ApiRoute("POST", "/sessions/{session_id}/finish", session_calls.finish_session),
    ApiRoute("GET", "/get_server_capabilities", session_calls.server_capabilities),
    ApiRoute("POST", "/telemetry", session_calls.telemetry),
    ApiRoute("POST", "/create_model", training_calls.create_model),
    ApiRoute("POST", "/unload_model", training_calls.unload_model),
    ApiRoute("POST", "/get_info", training_calls.get_info),
    ApiRoute(
        "POST",
        "/forward_backward",
        passing_over(training_calls.forward_backward, read_loss_place),
    ),
    ApiRoute("POST", "/optim_step", passing_over(training_calls.optim_step)),
    ApiRoute("POST", "/save_weights", passing_over(training_calls.save_weights)),
    ApiRoute(
        "POST", "/save_weights_for_sampler", passing_over(training_calls.save_weights_for_sampler)
    ),
    ApiRoute("POST", "/load_weights", passing_over(training_calls.load_weights)),
    ApiRoute("POST", "/create_sampling_session", sampling_calls.create_sampling_session),
    ApiRoute("GET", "/samplers/{sampler_id}", sampling_calls.describe_sampler),
    ApiRoute("POST", "/cancel_future", future_calls.cancel_future),
    ApiRoute("GET", "/flotilla/policy_spans/{request_id}", future_calls.policy_spans),
    ApiRoute("POST", "/weights_info", listing_calls.weights_info),
    ApiRoute("GET", "/training_runs", listing_calls.list_training_runs),
    ApiRoute("GET", _RUN, listing_calls.describe_training_run),
    ApiRoute("GET", f"{_RUN}/checkpoints", listing_calls.list_model_checkpoints),
    ApiRoute("GET", "/checkpoints", listing_calls.list_checkpoints),
    ApiRoute("DELETE", _CHECKPOINT, listing_calls.delete_checkpoint),
    ApiRoute("PUT", f"{_CHECKPOINT}/ttl", listing_calls.set_ttl),
    ApiRoute("GET", f"{_CHECKPOINT}/archive", listing_calls.archive),
    ApiRoute("POST", f"{_CHECKPOINT}/publish", listing_calls.refuse_publishing),
    ApiRoute("DELETE", f"{_CHECKPOINT}/publish", listing_calls.refuse_publishing),
    ApiRoute("GET", f"{_CHECKPOINT}/external_weights_urls", _NO_EXPORT),
    ApiRoute("POST", "/save_weights_external", passing_over(_NO_EXPORT)),
    ApiRoute("POST", "/copy_weights", _NO_PROJECTS),
    ApiRoute("POST", "/create_custom_loss", _NO_LOSSES),
    ApiRoute("POST", "/retrieve_futures", _NO_FLAG),
    ApiRoute("POST", "/join_sampling_session", _NO_FLAG),
    ApiRoute("POST", "/auth/token", _NO_PROJECTS),
    ApiRoute("POST", "/sessions/search", _NO_PROJECTS),
    ApiRoute("GET", "/audit", _NO_BILLS),
    ApiRoute("GET", "/billing/usage/events", _NO_BILLS),
    ApiRoute("GET", "/billing/usage/checkpoints/current", _NO_BILLS),
)
