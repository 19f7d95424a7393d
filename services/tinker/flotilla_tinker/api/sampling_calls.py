"""Calls that open samplers and sample."""

from flotilla_common.text.parsing import run_aside
from flotilla_tinker.api.calls import ApiAnswer, ClientCall, Front, answer_json
from flotilla_tinker.api.checks import check_base, check_sample
from flotilla_tinker.types import ClientOrder, Kind
from flotilla_tinker.wire.bodies import SamplingSessionBody
from flotilla_tinker.wire.checkpoint_paths import read_path
from flotilla_tinker.wire.json_bodies import read_json
from flotilla_tinker.wire.samples import read_sample_order
from flotilla_tinker.work.desk_errors import BadOrder, NotFound

_SAMPLE = ":sample:"


async def create_sampling_session(front: Front, call: ClientCall) -> ApiAnswer:
    given = read_json(call.body, SamplingSessionBody)
    if given.model_path is None and given.base_model is None:
        raise BadOrder("send a base_model or a model_path")
    base, _ = await front.facts.get()
    check_base(given.base_model, base)
    if given.model_path is not None:
        read_path(given.model_path)
    sampler_id = await front.desk.open_sampling_session(
        call.tenant,
        given.session_id,
        given.sampling_session_seq_id,
        base_model=given.base_model,
        model_path=given.model_path,
    )
    return answer_json(type="create_sampling_session", sampling_session_id=sampler_id)


async def describe_sampler(front: Front, call: ClientCall) -> ApiAnswer:
    found = await front.desk.describe_sampler(call.tenant, call.path["sampler_id"])
    return answer_json(
        sampler_id=found.sampler_id, base_model=found.base_model, model_path=found.model_path
    )


async def sample(front: Front, call: ClientCall) -> ApiAnswer:
    body = call.body
    sampler_id, seq_id, order = await run_aside(len(body), lambda: read_sample_order(body))
    _, engine = await front.facts.get()
    check_sample(order, engine)
    session_id, found, _ = sampler_id.partition(_SAMPLE)
    if not found:
        raise NotFound(f"there is no sampling session {sampler_id!r}")
    sequence_ids = [f"{sampler_id}:{seq_id}:{each}" for each in range(order.num_samples)]
    accepted = await front.desk.submit(
        ClientOrder(
            kind=Kind.SAMPLE,
            tenant=call.tenant,
            session_id=session_id,
            model_id=None,
            seq_id=seq_id,
            body=body,
            facts={"sampler_id": sampler_id, "sample_sequence_ids": sequence_ids},
        )
    )
    return answer_json(
        request_id=accepted.request_id, sample_sequence_ids=accepted.facts["sample_sequence_ids"]
    )
