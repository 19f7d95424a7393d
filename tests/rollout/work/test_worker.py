"""A whole worker over real gRPC, with a fake engine, against a failing learner and gateway."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from flotilla.env_gateway.v1 import episode_service_pb2 as env_pb
from flotilla.env_gateway.v1 import episode_service_pb2_grpc as env_grpc
from flotilla.learner.v1 import group_service_pb2 as group_pb
from flotilla.learner.v1 import group_service_pb2_grpc as group_grpc
from flotilla.learner.v1 import policy_pb2, trajectory_pb2
from flotilla_common.aio.concurrency import run_unless, run_until_first
from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.domain.policy import PolicyId
from flotilla_common.domain.token_authors import Author
from flotilla_common.images.picture import ShownPicture
from flotilla_common.rpc import rpc
from flotilla_common.weights.fingerprint import TokenizerDigests
from flotilla_common.wire.trajectory_columns import decode_spans
from flotilla_learner.sampling.tasks import IMAGES as LEARNERS_IMAGES
from flotilla_rollout.adapters.env_gateway import GatewayEnvironment
from flotilla_rollout.adapters.fake import FakeEngine
from flotilla_rollout.adapters.learner import GroupClient
from flotilla_rollout.adapters.learner_calls import IMAGES, RunEpoch, WorkerIdentity
from flotilla_rollout.episodes.episode import AttemptRunner
from flotilla_rollout.ports import Dialect, LearnerRefused
from flotilla_rollout.tokenizer_port import TemplateError
from flotilla_rollout.types import Completion, OpenRequest, Sampling
from flotilla_rollout.work.options import WorkerOptions
from flotilla_rollout.work.worker import Worker, choose_pause
from tests.support.fake_peers import (
    TOKEN,
    FakeGateway,
    FakeLearner,
    Submitted,
    lease,
    refuse,
    served,
)
from tests.support.rollout import POLICY, dialect, engine, limits, tokenizer, turns
from tests.support.waiting import until

LOOK = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
DONE = "<done>"
IDENTITY = WorkerIdentity("rollout-0", "incarnation", 1, TokenizerDigests(b"d" * 32))


@dataclass
class WorkerSetup:
    """A worker and its peers."""

    learner: FakeLearner
    gateway: FakeGateway
    environment: GatewayEnvironment
    engine: FakeEngine
    dialect: Dialect
    worker: Worker
    drain: asyncio.Event
    settled: asyncio.Event
    waiting: asyncio.Event
    running: "asyncio.Task[None]"

    def outcomes(self) -> dict[tuple[int, int], str | None]:
        return {s.key: s.header.WhichOneof("outcome") for s in self.learner.submitted}


@asynccontextmanager
async def setup(
    learner: FakeLearner,
    gateway: FakeGateway | None = None,
    texts: tuple[str, ...] = (LOOK, DONE),
    *,
    seconds: float = 0.0,
    max_attempts: int = 4,
    renew_interval_s: float = 0.1,
    capabilities: tuple[str, ...] = (),
    **changes: float,
) -> AsyncGenerator[WorkerSetup]:
    gateway = gateway or FakeGateway()
    fake = engine(turns(*texts), seconds)
    drain, settled, waiting = asyncio.Event(), asyncio.Event(), asyncio.Event()
    settled.set()

    def add(server: grpc.aio.Server) -> None:
        group_grpc.add_GroupServiceServicer_to_server(learner, server)
        env_grpc.add_EpisodeServiceServicer_to_server(gateway, server)

    async with served(add) as address, rpc.channel(address, token=TOKEN) as channel:
        environment = GatewayEnvironment(
            channel, run_id="run", worker_id="rollout-0", renew_interval_s=renew_interval_s
        )
        chosen = dialect()
        attempts = AttemptRunner(fake, environment, tokenizer(), chosen, limits(**changes))
        options = WorkerOptions(max_attempts, 0.1, 0.01, 5.0)
        identity = replace(IDENTITY, capabilities=capabilities)
        client = GroupClient(channel, identity, RunEpoch())
        policy = lambda: fake.policy  # noqa: E731
        worker = Worker(
            client, attempts, policy, options, settled=settled.wait, waits=waiting.is_set
        )
        running = asyncio.create_task(
            run_until_first(worker.run_until_drained(drain), environment.keep_renewing())
        )
        try:
            yield WorkerSetup(
                learner,
                gateway,
                environment,
                fake,
                chosen,
                worker,
                drain,
                settled,
                waiting,
                running,
            )
        finally:
            drain.set()
            await asyncio.gather(running, return_exceptions=True)
            await environment.wait_until_closed()
            assert gateway.open_now == set(), "an episode was left open"


def learner_with(*leases: group_pb.Lease, **fields: Any) -> FakeLearner:
    return FakeLearner(leases=list(leases), **fields)


@pytest.mark.parametrize("capabilities", [(), (IMAGES,)])
async def test_a_worker_tells_the_learner_what_it_is_capable_of(
    capabilities: tuple[str, ...],
) -> None:
    async with setup(learner_with(), capabilities=capabilities) as it:
        await until(lambda: bool(it.learner.polls))
    assert {tuple(poll.capabilities) for poll in it.learner.polls} == {capabilities}
    assert LEARNERS_IMAGES == IMAGES


async def test_a_leased_group_comes_back_whole() -> None:
    async with setup(learner_with(lease(attempts=3))) as it:
        await until(lambda: len(it.learner.submitted) == 3)
        assert it.outcomes() == {(0, 0): "reward", (1, 0): "reward", (2, 0): "reward"}
        assert [request.opening for request in it.gateway.opened] == [3, 3, 3]
        assert it.learner.polls[0].holding.version == POLICY.version
        _check_whole(it.learner.submitted[0])


async def test_no_try_begins_while_the_engine_waits_for_its_service() -> None:
    learner = FakeLearner()
    async with setup(learner) as it:
        it.waiting.set()
        learner.leases.append(lease(attempts=2))
        await until(lambda: len(learner.renewed) >= 2)
        assert not it.gateway.opened
        it.waiting.clear()
        await until(lambda: len(learner.submitted) == 2)
        assert it.outcomes() == {(0, 0): "reward", (1, 0): "reward"}


async def test_tools_are_sent_once_to_each_epoch_of_the_learner() -> None:
    learner = learner_with(lease("a", 1), lease("b", 1))
    async with setup(learner, max_attempts=1) as it:
        await until(lambda: len(it.learner.submitted) == 2)
        learner.run_epoch = 2
        learner.leases += [lease("c", 1), lease("d", 1)]
        await until(lambda: len(it.learner.submitted) == 4)
    headers = [submitted.header for submitted in learner.submitted]
    tools = headers[0].tools
    assert [tool["function"]["name"] for tool in json.loads(tools)] == ["look"]
    assert [header.tools for header in headers] == [tools, b"", tools, b""]
    assert len({header.tool_schema_digest for header in headers}) == 1


def _check_whole(submitted: Submitted) -> None:
    header = submitted.header
    (sequence,) = header.sequences
    assert sequence.token_count * 4 == len(submitted.token_ids)
    spans = decode_spans(sequence.spans)
    assert sum(span.length for span in spans) == sequence.token_count
    logprobs = np.frombuffer(submitted.logprobs, "<f4")
    assert sum(s.length for s in spans if s.author is Author.POLICY) == len(logprobs)
    assert header.stop_reason == trajectory_pb2.STOP_REASON_DONE
    assert (header.env_key, header.task_key) == ("shop", "task")
    assert header.instance_id == "instance"
    assert len(header.tool_schema_digest) == len(header.prompt_digest) == 32
    assert header.counts.tool_calls == 1
    assert len(header.turns.generate_s) == 2


async def test_what_the_environment_shows_first_follows_the_prompt() -> None:
    screenshot = env_pb.Media(mime="image/png", size_bytes=9, sha256=b"h")
    gateway = FakeGateway(
        shown=[env_pb.ContentPart(text="You are at sea."), env_pb.ContentPart(media=screenshot)]
    )
    async with setup(learner_with(lease(attempts=1)), gateway) as it:
        await until(lambda: len(it.learner.submitted) == 1)
        ids = np.frombuffer(it.learner.submitted[0].token_ids, "<i4")
        assert "Find it.\n\nYou are at sea.\n\n[image/png, 9 bytes]" in tokenizer().decode(
            ids.tolist()
        )


async def test_no_more_is_leased_than_fits() -> None:
    learner = learner_with(lease("a", 4), lease("b", 4))
    # The first four must not have ended before a busy machine looks.
    async with setup(learner, seconds=1.0, max_attempts=4) as it:
        await until(lambda: it.worker.running_attempts == 4)
        await asyncio.sleep(0.1)
        assert len(learner.leases) == 1
        await until(lambda: len(learner.submitted) == 8)


async def test_a_failed_try_is_reported_and_tried_again_alone() -> None:
    gateway = FakeGateway(open_failures=1)
    async with setup(learner_with(lease()), gateway) as it:
        await until(lambda: len(it.learner.submitted) == 3)
        kinds = sorted(kind or "" for kind in it.outcomes().values())
        assert kinds == ["failure", "reward", "reward"]
        failed = next(s for s in it.learner.submitted if s.header.HasField("failure"))
        assert failed.header.failure == trajectory_pb2.FAILURE_KIND_ENV_LOST
        assert failed.header.detail == "no instance"
        assert not failed.header.sequences
        assert [request.opening for request in gateway.opened] == [2, 2, 1]


@pytest.mark.parametrize("used", [0, 2, 3])
async def test_tries_that_earlier_leases_left_are_made_and_the_lease_is_given_back(
    used: int,
) -> None:
    given = lease(attempts=1)
    given.attempts[0].next_try = used
    async with setup(learner_with(given), FakeGateway(reward=None)) as it:
        await until(lambda: it.learner.released)
        assert it.outcomes() == {(0, number): "no_grade" for number in range(used, 3)}
        assert it.learner.released == ["l1"]


async def test_a_template_error_is_handed_in_once_and_ends_its_whole_group() -> None:
    async with setup(learner_with(lease("l1", 3), lease("l2", 1)), seconds=0.2) as it:
        fails = iter([True])
        encode = it.dialect.bridge_ids

        def bridge_ids(*args: Any, **named: Any) -> list[int]:
            if next(fails, False):
                raise TemplateError("roles must alternate")
            return encode(*args, **named)

        it.dialect.bridge_ids = bridge_ids
        await until(lambda: len(it.learner.submitted) == 2)
        first, other = it.learner.submitted
        assert first.header.failure == trajectory_pb2.FAILURE_KIND_TEMPLATE_ERROR
        assert first.header.detail == "roles must alternate"
        assert (other.header.lease_id, other.header.reward) == ("l2", 1.0)
        assert it.worker.totals.lost_leases == 0
        await until(lambda: it.worker.lease_count == 0)
        assert "l1" not in it.learner.released
        assert len(it.learner.submitted) == 2, "the others of its group are not played to their end"


async def test_tool_errors_are_shown_to_the_policy() -> None:
    def answer(request: env_pb.CallToolRequest) -> env_pb.CallToolResponse:
        part = env_pb.ContentPart(text="no such hotel")
        return env_pb.CallToolResponse(outcome=env_pb.TOOL_OUTCOME_BAD_ARGUMENTS, parts=[part])

    async with setup(learner_with(lease(attempts=1)), FakeGateway(answer)) as it:
        await until(lambda: it.learner.submitted)
        (submitted,) = it.learner.submitted
        assert dict(submitted.header.counts.tool_errors) == {"bad_arguments": 1}
        text = tokenizer().decode(np.frombuffer(submitted.token_ids, "<i4").tolist())
        assert '{"error": "no such hotel"}' in text


async def test_a_lost_episode_fails_alone() -> None:
    gateway = FakeGateway(lost={"e1"})
    # A renewal of its lease would tell it in other words.
    async with setup(learner_with(lease()), gateway, renew_interval_s=60.0) as it:
        await until(lambda: len(it.learner.submitted) == 3)
        failures = [s for s in it.learner.submitted if s.header.HasField("failure")]
        assert len(failures) == 1
        assert "EPISODE_LOST" in failures[0].header.detail


async def test_a_refused_task_is_a_failure_with_its_reason() -> None:
    error = refuse(grpc.StatusCode.INVALID_ARGUMENT, "UNKNOWN_ENVIRONMENT")
    gateway = FakeGateway(refuse_open=error)
    async with setup(learner_with(lease(attempts=1, max_tries=1)), gateway) as it:
        await until(lambda: it.learner.submitted)
        assert "UNKNOWN_ENVIRONMENT" in it.learner.submitted[0].header.detail


async def test_a_slow_tool_that_uses_up_the_time_is_graded_as_timeout() -> None:
    gateway = FakeGateway(seconds=3.0)
    learner = learner_with(lease(attempts=1))
    async with setup(learner, gateway, attempt_timeout_s=0.3) as it:
        await until(lambda: it.learner.submitted)
        header = it.learner.submitted[0].header
        assert header.stop_reason == trajectory_pb2.STOP_REASON_TIMEOUT
        assert header.HasField("reward")


async def test_a_gateway_that_is_away_for_a_moment_costs_nothing() -> None:
    gateway = FakeGateway(fail={"OpenEpisode": 2, "CallTool": 2, "Grade": 2})
    learner = learner_with(lease(attempts=1))
    async with setup(learner, gateway, grade_timeout_s=2.0) as it:
        await until(lambda: it.learner.submitted)
        assert it.outcomes() == {(0, 0): "reward"}
        assert [call.call_seq for call in gateway.calls] == [0]


async def test_a_learner_that_is_away_for_a_moment_costs_nothing() -> None:
    learner = learner_with(lease(attempts=1))
    learner.fail = {"LeaseGroup": 2, "SubmitTrajectory": 2}
    async with setup(learner) as it:
        await until(lambda: it.learner.submitted, 10.0)
        assert it.outcomes() == {(0, 0): "reward"}


async def test_a_submission_that_the_learner_ended_for_standing_still_is_sent_again() -> None:
    learner = learner_with(lease(attempts=1))
    learner.stalled = 2
    async with setup(learner) as it:
        await until(lambda: it.learner.submitted, 10.0)
        # Under its first try: nothing was lost and nothing is sampled twice.
        assert it.outcomes() == {(0, 0): "reward"}
        assert not learner.stalled


async def test_a_new_epoch_of_the_learner_is_adopted() -> None:
    async with setup(learner_with(lease(attempts=1)), seconds=0.1) as it:
        await until(lambda: it.worker.running_attempts)
        it.learner.run_epoch = 2
        await until(lambda: it.learner.submitted)
        it.learner.leases.append(lease("l2", 1, run_epoch=2))
        await until(lambda: len(it.learner.submitted) == 2)


async def test_leases_and_episodes_are_renewed_in_one_call_each() -> None:
    learner = learner_with(lease("a", 1), lease("b", 1))
    async with setup(learner, seconds=0.4) as it:
        await until(lambda: ["a", "b"] in [sorted(ids) for ids in learner.renewed])
        await until(lambda: any(len(ids) == 2 for ids in it.gateway.renewed))


async def test_a_lost_lease_is_dropped_at_once() -> None:
    learner = learner_with(lease("a", 2))
    async with setup(learner, seconds=30.0) as it:
        await until(lambda: it.engine.running == 2)
        learner.lost.add("a")
        await until(lambda: not it.gateway.open_now)
        await until(lambda: it.worker.running_attempts == 0)
        assert learner.submitted == []


async def test_a_lease_found_lost_at_submission_ends_its_group() -> None:
    learner = learner_with(lease("a", 1), lost={"a"})
    learner.fail["RenewLeases"] = 1000
    async with setup(learner) as it:
        await until(lambda: it.worker.totals.lost_leases == 1)
        await until(lambda: it.worker.running_attempts == 0)


async def test_a_drain_gives_work_back_before_episodes_end() -> None:
    learner = learner_with(lease("a", 2))
    async with setup(learner, seconds=30.0) as it:
        await until(lambda: it.engine.running == 2)
        it.drain.set()
        await asyncio.wait_for(it.running, 2.0)
        assert learner.released == ["a"]
        assert it.gateway.open_now == set()


async def test_an_end_of_any_kind_waits_until_slow_environments_are_closed() -> None:
    gateway = FakeGateway(close_seconds=0.3)
    async with setup(learner_with(lease("a", 2)), gateway, seconds=30.0) as it:
        await until(lambda: it.engine.running == 2)
        it.running.cancel()
        await asyncio.wait({it.running}, timeout=30.0)
        assert it.gateway.open_now == set()


async def test_a_text_too_large_for_an_answer_is_fetched_and_cut() -> None:
    media = env_pb.Media(mime="text/plain", sha256=b"s" * 32, size_bytes=900_000)
    part = env_pb.ContentPart(media=media)
    answer = env_pb.CallToolResponse(outcome=env_pb.TOOL_OUTCOME_OK, parts=[part])
    gateway = FakeGateway(lambda _: answer, media=b"look " * 180_000)
    request = OpenRequest(AttemptKey("g", 0, 0), "{}", 1, 5.0)
    async with (
        setup(learner_with(), gateway) as it,
        it.environment.open_episode(request) as episode,
    ):
        text = (await episode.call_tool("look", "{}", 2.0)).text
    assert text.startswith("look look")
    assert text.endswith("[cut here: 900000 bytes in all]")
    assert len(text) < 300_000


async def test_a_grade_that_the_gateway_refuses_is_no_lost_instance() -> None:
    gateway = FakeGateway(refuse_grade=refuse(grpc.StatusCode.INVALID_ARGUMENT, "BAD_REQUEST"))
    async with setup(learner_with(lease(attempts=1, max_tries=1)), gateway) as it:
        await until(lambda: it.learner.submitted)
        header = it.learner.submitted[0].header
        assert header.no_grade == trajectory_pb2.NO_GRADE_REASON_EXECUTION_FAILED
        assert "BAD_REQUEST" in header.detail


async def test_a_drain_does_not_wait_for_peers_that_never_come() -> None:
    drain = asyncio.Event()
    waiting = asyncio.create_task(run_unless(drain, asyncio.sleep(60.0)))
    await asyncio.sleep(0)
    drain.set()
    assert await asyncio.wait_for(waiting, 1.0) is None
    assert await run_unless(asyncio.Event(), asyncio.sleep(0, "here")) == "here"


async def test_a_lease_granted_while_the_poll_is_cut_by_a_drain_is_given_back() -> None:
    learner = learner_with(lease("a", 2), answer_seconds=5.0)
    async with setup(learner) as it:
        await until(lambda: learner.granted)
        it.drain.set()
        await asyncio.wait_for(it.running, 3.0)
        assert learner.released == ["a"]


async def test_a_refused_submission_is_reported_once_and_never_played_again() -> None:
    learner = learner_with(lease("a", 1), lease("b", 1), malformed=1)
    async with setup(learner) as it:
        await until(lambda: it.learner.submitted and it.worker.lease_count == 0)
        await until(lambda: len(it.learner.submitted) == 2)
        refused, other = sorted(learner.submitted, key=lambda s: s.header.HasField("reward"))
        assert refused.header.failure == trajectory_pb2.FAILURE_KIND_REFUSED_BY_LEARNER
        assert "MALFORMED_TRAJECTORY" in refused.header.detail
        assert (refused.key, other.key) == ((0, 0), (0, 0))
        await until(lambda: it.worker.lease_count == 0)
        assert len(it.gateway.opened) == 2
        assert "a" not in learner.released, "the learner has ended its group"


async def test_a_refused_failure_is_reported_too() -> None:
    gateway = FakeGateway(refuse_grade=refuse(grpc.StatusCode.INVALID_ARGUMENT, "BAD_REQUEST"))
    async with setup(learner_with(lease("a", 1), malformed=1), gateway) as it:
        await until(lambda: it.learner.submitted)
        header = it.learner.submitted[0].header
        assert header.failure == trajectory_pb2.FAILURE_KIND_REFUSED_BY_LEARNER
        assert len(it.gateway.opened) == 1


async def test_a_worker_whose_report_of_a_refusal_is_refused_ends() -> None:
    async with setup(learner_with(lease("a", 1), malformed=2)) as it:
        with pytest.raises(LearnerRefused, match="MALFORMED_TRAJECTORY"):
            await asyncio.wait_for(asyncio.shield(it.running), 5.0)
        # By the group, or by the worker as it ends, or by both.
        assert {*it.learner.released} == {"a"}
        assert len(it.gateway.opened) == 1


async def test_nothing_is_handed_in_while_new_weights_are_judged() -> None:
    async with setup(learner_with(lease("a", 1))) as it:
        it.settled.clear()
        await until(lambda: it.gateway.grades)
        await asyncio.sleep(0.05)
        assert it.learner.submitted == []
        it.settled.set()
        await until(lambda: it.learner.submitted)


async def test_work_on_other_weights_than_the_evaluated_ones_is_given_back() -> None:
    other = policy_pb2.PolicyId(run_epoch=1, version=POLICY.version + 1)
    exam = lease("a", 1, purpose=group_pb.PURPOSE_EVAL, exact_policy=other)
    async with setup(learner_with(exam)) as it:
        await until(lambda: it.learner.released == ["a"])
        assert it.gateway.opened == []


async def test_an_evaluation_that_spans_two_policies_is_not_handed_in() -> None:
    exact = policy_pb2.PolicyId(run_epoch=1, version=POLICY.version)
    exam = lease("a", 1, purpose=group_pb.PURPOSE_EVAL, exact_policy=exact)
    async with setup(learner_with(exam), seconds=0.2) as it:
        await until(lambda: it.engine.running)
        it.engine.policy = PolicyId(1, POLICY.version + 1)
        await until(lambda: it.learner.released == ["a"])
        assert it.learner.submitted == []


async def test_a_worker_that_the_learner_refuses_ends() -> None:
    class Refusing(FakeLearner):
        async def LeaseGroup(self, request: Any, context: Any) -> group_pb.LeaseGroupResponse:
            raise refuse(grpc.StatusCode.FAILED_PRECONDITION, "TOKENIZER_MISMATCH")

    async with setup(Refusing()) as it:
        with pytest.raises(LearnerRefused, match="TOKENIZER_MISMATCH"):
            await asyncio.wait_for(asyncio.shield(it.running), 5.0)


async def test_a_dead_engine_uses_up_no_tries() -> None:
    async with setup(learner_with(lease("a", 2)), seconds=0.1) as it:
        it.engine.death.set_result("killed")
        await until(lambda: it.learner.released == ["a"])
        assert it.learner.submitted == []


async def test_a_fault_in_one_attempt_leaves_the_others_alone() -> None:
    class Faulty(FakeEngine):
        faults = 1

        async def generate(
            self,
            token_ids: NDArray[np.int32],
            sampling: Sampling,
            max_tokens: int,
            timeout_s: float = inf,
            pictures: Sequence[ShownPicture] = (),
        ) -> Completion:
            if self.faults:
                self.faults -= 1
                raise ZeroDivisionError("a fault of ours")
            return await super().generate(token_ids, sampling, max_tokens, timeout_s, pictures)

    async with setup(learner_with(lease())) as it:
        it.engine.__class__ = Faulty
        await until(lambda: len(it.learner.submitted) == 3)
        kinds = sorted(kind or "" for kind in it.outcomes().values())
        assert kinds == ["failure", "reward", "reward"]


@pytest.mark.parametrize("failures", [1, 2, 5])
def test_each_pause_may_be_twice_as_long_as_the_one_before(failures: int) -> None:
    pauses = [choose_pause(0.25, failures) for _ in range(50)]
    most = 0.25 * 2 ** (failures - 1)
    assert most / 2 <= min(pauses) < max(pauses) <= most
