"""Conversion between `flotilla.env_gateway.v1` and the gateway's own types."""

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla_common.domain.attempts import Grade
from flotilla_common.rpc import rpc
from flotilla_common.tasks.task_format import TaskError, parse_task
from flotilla_common.wire.enums import NO_GRADE_REASONS, TOOL_OUTCOMES
from flotilla_env_gateway.api import status
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.episodes.counters import counts_by_kind
from flotilla_env_gateway.episodes.episode_book import EpisodeSpec, EpisodeState
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.ports import CallAnswer, Media, Part, Text, Tool

EPISODE_STATES = {
    EpisodeState.QUEUED: pb.EPISODE_STATE_QUEUED,
    EpisodeState.PROVISIONING: pb.EPISODE_STATE_PROVISIONING,
    EpisodeState.WARMING: pb.EPISODE_STATE_WARMING,
    EpisodeState.READY: pb.EPISODE_STATE_READY,
    EpisodeState.FAILED: pb.EPISODE_STATE_FAILED,
}


def decode_open_request(request: pb.OpenEpisodeRequest, config: EnvGatewayConfig) -> EpisodeSpec:
    """Decode a request to open an episode. Raises TaskError, also for missing fields outside
    the task."""
    for name in ("request_id", "run_id", "group_id", "worker_id"):
        if not getattr(request, name):
            raise TaskError(f"{name} is empty")
    budget_s = rpc.to_seconds(request.budget) if request.HasField("budget") else config.budget_s
    if budget_s <= 0:
        raise TaskError(f"budget must be positive, not {budget_s} s")
    return EpisodeSpec(
        request_id=request.request_id,
        run_id=request.run_id,
        group_id=request.group_id,
        attempt_index=request.attempt_index,
        try_index=getattr(request, "try"),
        opening=max(1, request.opening),
        worker_id=request.worker_id,
        task=parse_task(request.task_json),
        budget_s=min(budget_s, config.max_budget_s),
    )


def encode_ready(
    session: Session, *, lease_ttl_s: float, remaining_s: float, transcript_bytes: int
) -> pb.EpisodeReady:
    instance = session.instance
    assert instance is not None, "an episode is READY only with an instance"
    task = session.episode.spec.task
    return pb.EpisodeReady(
        tools=[_encode_tool(tool) for tool in session.tools.values()],
        facts=pb.PromptFacts(
            prompt=task.prompt, current_date=task.current_date, variables=task.variables
        ),
        instance_id=instance.instance_id,
        env_version=instance.env_version,
        data_version=instance.data_version,
        lease_ttl=rpc.to_duration(lease_ttl_s),
        deadline=rpc.to_duration(max(0.0, remaining_s)),
        open_time=rpc.to_duration(session.open_s),
        initial_observation=[_encode_part(part) for part in session.first_observation],
        transcript_bytes=transcript_bytes,
        regrades=instance.regrades,
    )


def encode_answer(answer: CallAnswer, *, replayed: bool) -> pb.CallToolResponse:
    return pb.CallToolResponse(
        outcome=TOOL_OUTCOMES.encode(answer.outcome),
        parts=[_encode_part(part) for part in answer.parts],
        reward=answer.reward,
        done=answer.done,
        attempts=answer.attempts,
        queue_time=rpc.to_duration(answer.queue_s),
        upstream_time=rpc.to_duration(answer.upstream_s),
        replayed=replayed,
    )


def encode_grade(grade: Grade) -> pb.GradeResponse:
    response = pb.GradeResponse(
        partial_reward=grade.partial_reward,
        checks_passed=[replace_surrogates(check) for check in grade.checks_passed],
        checks_failed=[replace_surrogates(check) for check in grade.checks_failed],
        stdout=grade.stdout,
        attempts=grade.attempts,
        suspicion=replace_surrogates(grade.suspicion),
        named_rewards=grade.named_rewards,
    )
    if grade.reason is not None:
        response.no_grade.reason = NO_GRADE_REASONS.encode(grade.reason)
        response.no_grade.detail = replace_surrogates(grade.detail[:8192])
        response.no_grade.verifier_fault = grade.verifier_fault
    elif grade.reward is not None:
        response.reward = grade.reward
    elif grade.to_be_judged:
        response.to_be_judged.SetInParent()
    return response


def encode_status(gateway: Gateway) -> pb.GetStatusResponse:
    env_keys = {*gateway.book.count_by_state(), *gateway.counts.env_keys()}
    return pb.GetStatusResponse(
        phase="draining" if gateway.draining else "serving",
        environments=[_encode_environment(gateway, env_key) for env_key in sorted(env_keys)],
        instances_created=gateway.opener.created,
        instances_closed=gateway.closer.closed,
        limiters=status.list_limiters(gateway),
        retry_tokens=status.fewest_retry_tokens(gateway),
        delete_backlog=gateway.closer.pending,
        sandbox_limits=gateway.sandbox_limits,
    )


def _encode_environment(gateway: Gateway, env_key: str) -> pb.EnvironmentStatus:
    counts = gateway.counts
    return pb.EnvironmentStatus(
        env_key=env_key,
        backend=gateway.config.backend_of(env_key),
        episodes=gateway.book.count_by_state().get(env_key, {}),
        limit=gateway.admission.limit_of(env_key),
        calls=counts.calls[env_key],
        call_errors=counts.call_errors(env_key),
        grades=counts.grades[env_key],
        no_grades=counts.no_grades[env_key],
        no_grade_reasons=counts_by_kind(counts.no_grade_reasons, env_key),
        outcomes=counts_by_kind(counts.outcomes, env_key),
        tainted=counts.tainted[env_key],
        expired=counts.expired[env_key],
        suspects=counts.suspects[env_key],
        breaker=status.breaker_states(gateway).get(env_key, ""),
    )


def _encode_tool(tool: Tool) -> pb.Tool:
    return pb.Tool(
        name=replace_surrogates(tool.name),
        description=replace_surrogates(tool.description),
        input_schema_json=replace_surrogates(tool.input_schema_json),
        read_only=tool.read_only,
        idempotent=tool.idempotent,
        parallel=tool.parallel,
    )


def _encode_part(part: Part) -> pb.ContentPart:
    if isinstance(part, Text):
        return pb.ContentPart(text=replace_surrogates(part.text))
    return pb.ContentPart(media=_encode_media(part))


def _encode_media(media: Media) -> pb.Media:
    return pb.Media(
        data=media.data,
        mime=replace_surrogates(media.mime),
        sha256=media.sha256,
        size_bytes=media.size,
        width=media.width,
        height=media.height,
    )


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which environments and verifiers may send but protobuf refuses."""
    return text.encode("utf-8", "replace").decode()
