"""Calls about clients: their configuration, sessions, and what this server offers."""

from flotilla_tinker.api.calls import ApiAnswer, ClientCall, Front, answer_json
from flotilla_tinker.wire.bodies import (
    ClientConfigBody,
    CreateSessionBody,
    FinishSessionBody,
    HeartbeatBody,
)
from flotilla_tinker.wire.json_bodies import read_json
from flotilla_tinker.work.desk_errors import NotFound

_REFRESH_S = 300


async def client_config(front: Front, call: ClientCall) -> ApiAnswer:
    read_json(call.body, ClientConfigBody)
    return answer_json(**front.client_flags)


async def client_dynamic_config(front: Front, call: ClientCall) -> ApiAnswer:
    read_json(call.body, ClientConfigBody)
    # A sample that the client gave up is cancelled.
    return answer_json(refresh_interval_sec=_REFRESH_S, sample_cancel_enabled=True)


async def create_session(front: Front, call: ClientCall) -> ApiAnswer:
    given = read_json(call.body, CreateSessionBody)
    facts = {
        "tags": given.tags,
        "user_metadata": given.user_metadata or {},
        "sdk_version": given.sdk_version,
        "display_name": given.display_name,
    }
    session_id = await front.desk.open_session(call.tenant, facts)
    return answer_json(type="create_session", session_id=session_id)


async def session_heartbeat(front: Front, call: ClientCall) -> ApiAnswer:
    given = read_json(call.body, HeartbeatBody)
    await front.desk.heartbeat(call.tenant, given.session_id)
    return answer_json(type="session_heartbeat")


async def finish_session(front: Front, call: ClientCall) -> ApiAnswer:
    read_json(call.body or b"{}", FinishSessionBody)
    await front.desk.finish_session(call.tenant, call.path["session_id"])
    return answer_json()


async def list_sessions(front: Front, call: ClientCall) -> ApiAnswer:
    """List the sessions that trained something."""
    models = await front.desk.list_models(call.tenant)
    return answer_json(sessions=list(dict.fromkeys(model.session_id for model in models)))


async def describe_session(front: Front, call: ClientCall) -> ApiAnswer:
    models = await front.desk.list_models(call.tenant)
    session_id = call.path["session_id"]
    found = [model.model_id for model in models if model.session_id == session_id]
    if not found:
        raise NotFound(f"there is no session {session_id!r} that trained something")
    return answer_json(training_run_ids=found, sampler_ids=[])


async def server_capabilities(front: Front, call: ClientCall) -> ApiAnswer:
    base, engine = await front.facts.get()
    model = {
        "model_name": base.model,
        "max_context_length": min(base.max_model_len, engine.max_model_len),
        "trainable": True,
        "sampleable": True,
    }
    return answer_json(supported_models=[model])


async def healthz(front: Front, call: ClientCall) -> ApiAnswer:
    return answer_json(status="ok")


async def telemetry(front: Front, call: ClientCall) -> ApiAnswer:
    """Accept the SDK's own events; nobody reads them."""
    return answer_json(status="accepted")
