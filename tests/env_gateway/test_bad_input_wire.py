"""Whatever bytes come to a running gateway, the answer is a precise status and nothing is lost.

An episode is open all the while, and after each test it is as it was: open, and the only one.
"""

import json
import os
import socket
import struct
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from services.common import rpc
from services.common.errors import ServiceError
from services.env_gateway.ports import CallResult, Text
from tests.env_gateway.support import task_json
from tests.env_gateway.threaded import TOKEN, Served, served, wait_until

SERVICE = "flotilla.env_gateway.v1.EpisodeService"
METHODS = pb.DESCRIPTOR.services_by_name["EpisodeService"].methods_by_name
# Without Drain, whose every message is a wish to end the gateway.
NAMES = sorted(set(METHODS) - {"Drain"})
# With a string as their first field.
WITH_TEXT = sorted(set(NAMES) - {"Grade", "WatchCapacity", "GetStatus"})
AUTHORIZED = (("authorization", f"Bearer {TOKEN}"),)
OURS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
}
WIRE = settings(
    max_examples=60,
    deadline=None,
    # The gateway and its open episode are the same for all examples, which is the point.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


class Refused(Exception):
    """A status, and the gateway's own error in it if there is one."""

    def __init__(self, error: Any) -> None:
        super().__init__(error)
        self.code: grpc.StatusCode = error.code()
        self.error: ServiceError | None = rpc.service_error(error)

    @property
    def reason(self) -> str:
        return self.error.reason if self.error else ""


@dataclass(slots=True)
class Wire:
    """Raw bytes to a gateway, and an episode that is open at it."""

    served: Served
    channel: grpc.Channel
    episode_id: str = ""
    calls: int = 0

    def send(
        self,
        name: str,
        *messages: bytes,
        metadata: Any = AUTHORIZED,
        timeout: float = 5.0,
        service: str = SERVICE,
    ) -> list[bytes]:
        """The answers to messages sent as they are. Raises Refused."""
        method = METHODS.get(name)
        into = bool(method and method.client_streaming)
        out = bool(method and method.server_streaming)
        kind = f"{'stream' if into else 'unary'}_{'stream' if out else 'unary'}"
        call = getattr(self.channel, kind)(f"/{service}/{name}")
        request = iter(messages) if into else messages[0]
        try:
            answer = call(request, metadata=metadata, timeout=timeout)
            if name == "WatchCapacity":
                first = [next(answer)]
                answer.cancel()
                return first
            return list(answer) if out else [answer]
        except grpc.RpcError as error:
            raise Refused(error) from error

    def open(self, request_id: str, **changes: Any) -> list[pb.OpenEpisodeResponse]:
        fields: dict[str, Any] = {
            "request_id": request_id,
            "run_id": "run",
            "group_id": request_id,
            "opening": 1,
            "task_json": task_json(),
            "worker_id": "rollout-0",
        }
        request = pb.OpenEpisodeRequest(**(fields | changes))
        answers = self.send("OpenEpisode", request.SerializeToString())
        return [pb.OpenEpisodeResponse.FromString(answer) for answer in answers]

    def call(self, name: str, arguments: str = "{}", **changes: Any) -> pb.CallToolResponse:
        """A call of the open episode."""
        fields: dict[str, Any] = {
            "episode_id": self.episode_id,
            "call_seq": self.calls,
            "name": name,
            "arguments_json": arguments,
        }
        request = pb.CallToolRequest(**(fields | changes))
        (answer,) = self.send("CallTool", request.SerializeToString())
        self.calls += 1
        return pb.CallToolResponse.FromString(answer)

    def grade(self, *requests: pb.GradeRequest) -> pb.GradeResponse:
        (answer,) = self.send("Grade", *(request.SerializeToString() for request in requests))
        return pb.GradeResponse.FromString(answer)

    def close(self, episode_id: str) -> None:
        self.send("CloseEpisode", pb.CloseEpisodeRequest(episode_id=episode_id).SerializeToString())

    def is_well(self) -> bool:
        """The one episode is open, and answers as before."""
        answer = self.call("look")
        return answer.outcome == pb.TOOL_OUTCOME_OK and answer.parts[0].text == "0"


@pytest.fixture(scope="module")
def running() -> Iterator[Wire]:
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with (
        served(limits={"transcript_bytes": 2**20}) as gateway,
        grpc.insecure_channel(gateway.address, options=options) as channel,
    ):
        wire = Wire(gateway, channel)
        wire.episode_id = wire.open("witness")[-1].episode_id
        yield wire


@pytest.fixture
def wire(running: Wire) -> Iterator[Wire]:
    yield running
    running.served.backend.hook = None
    wait_until(lambda: len(running.served.backend.running) == 1)
    wait_until(lambda: running.served.gateway.admission.held == 1)
    assert running.is_well()


def refused(wire: Wire, name: str, *messages: bytes, **keywords: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        wire.send(name, *messages, **keywords)
    assert TOKEN not in repr(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("OpenEpisode", "BAD_TASK"),
        ("CallTool", "EPISODE_LOST"),
        ("FetchMedia", "EPISODE_LOST"),
        ("Grade", "BAD_REQUEST"),
        ("RenewEpisodes", ""),
        ("CloseEpisode", ""),
        ("WatchCapacity", ""),
        ("GetStatus", ""),
    ],
)
def test_an_empty_message_is_judged_as_what_it_means(wire: Wire, name: str, reason: str) -> None:
    if reason:
        assert refused(wire, name, b"").reason == reason
    else:
        assert wire.send(name, b"")


@pytest.mark.parametrize("name", NAMES)
@given(message=st.binary(min_size=1, max_size=200))
@WIRE
def test_any_bytes_are_a_request_or_a_refusal(wire: Wire, name: str, message: bytes) -> None:
    try:
        wire.send(name, message)
    except Refused as refusal:
        assert refusal.code in OURS and refusal.reason, refusal


@pytest.mark.parametrize("name", [*WITH_TEXT, "Grade"])
@pytest.mark.parametrize(
    "message",
    [b"\xff" * 200, b"\x0a\xff", b"\x0a\x02\xff\xfe", b"\x0b" * 5000],
    ids=["random", "truncated varint", "no UTF-8", "nested groups"],
)
def test_malformed_bytes_are_named_so(wire: Wire, name: str, message: bytes) -> None:
    refusal = refused(wire, name, message)
    assert (refusal.code, refusal.reason) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "MALFORMED_MESSAGE",
    )


def test_a_field_of_a_newer_contract_is_passed_over(wire: Wire) -> None:
    unknown = b"\x98\x06\x01"
    request = pb.RenewEpisodesRequest(worker_id="rollout-0", episode_ids=[wire.episode_id])
    (answer,) = wire.send("RenewEpisodes", request.SerializeToString() + unknown)
    assert not pb.RenewEpisodesResponse.FromString(answer).lost_episode_ids


@pytest.mark.parametrize(
    ("extra", "code"),
    [(-1, "INVALID_ARGUMENT"), (0, "INVALID_ARGUMENT"), (1, "RESOURCE_EXHAUSTED")],
)
def test_a_message_may_be_as_large_as_the_limit(wire: Wire, extra: int, code: str) -> None:
    frame = len(pb.OpenEpisodeRequest(task_json="x" * 2**20).SerializeToString()) - 2**20
    size = rpc.MAX_MESSAGE_BYTES + extra
    message = pb.OpenEpisodeRequest(task_json="x" * (size - frame)).SerializeToString()
    assert len(message) == size
    assert refused(wire, "OpenEpisode", message).code.name == code


@pytest.mark.parametrize("name", NAMES)
def test_metadata_beyond_the_limit_ends_one_call_only(wire: Wire, name: str) -> None:
    metadata = (*AUTHORIZED, ("big", "x" * (2**14 + 1)))
    assert refused(wire, name, b"", metadata=metadata).code.name == "RESOURCE_EXHAUSTED"


def test_metadata_may_repeat_a_key(wire: Wire) -> None:
    assert wire.send("GetStatus", b"", metadata=(*AUTHORIZED, ("k", "1"), ("k", "2")))


@pytest.mark.parametrize("name", [*NAMES, "Drain"])
@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ((), "TOKEN_MISSING"),
        ((("authorization", f"Bearer {TOKEN}x"),), "TOKEN_WRONG"),
        ((("authorization", TOKEN),), "TOKEN_WRONG"),
        (AUTHORIZED * 2, "TOKEN_WRONG"),
    ],
)
def test_no_method_answers_without_the_token(
    wire: Wire, name: str, metadata: Any, reason: str
) -> None:
    refusal = refused(wire, name, b"\xff", metadata=metadata)
    assert (refusal.code.name, refusal.reason) == ("UNAUTHENTICATED", reason)


@pytest.mark.parametrize("value", [f"Bearer {TOKEN}\n", f"Bearer {TOKEN}\r\nx: y", "Bearer \0"])
def test_a_token_with_a_line_end_never_leaves(wire: Wire, value: str) -> None:
    with pytest.raises((ValueError, Refused)):
        wire.send("GetStatus", b"", metadata=(("authorization", value),))


@pytest.mark.parametrize(
    ("service", "name"),
    [(SERVICE, "Nothing"), ("flotilla.env_gateway.v2.EpisodeService", "GetStatus"), ("", "")],
)
def test_an_unknown_method_is_unimplemented(wire: Wire, service: str, name: str) -> None:
    assert refused(wire, name, b"", service=service).code is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /flotilla HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n",
        os.urandom(500),
        # A TLS handshake that goes no further.
        bytes.fromhex("16030100a5010000a10303"),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 50,
    ],
    ids=["HTTP/1.1", "unfinished HTTP/1.1", "random", "half-open TLS", "broken HTTP/2"],
)
def test_bytes_of_another_protocol_do_not_disturb_others(wire: Wire, junk: bytes) -> None:
    host, _, port = wire.served.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5.0) as stranger:
        stranger.sendall(junk)
        assert wire.is_well()
    with socket.create_connection((host, int(port)), timeout=5.0) as stranger:
        # Reset rather than closed.
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stranger.sendall(junk)


def test_a_deadline_that_has_passed_ends_the_call_and_one_of_ages_does_not(wire: Wire) -> None:
    for seconds in (-1.0, -1e9):
        refusal = refused(wire, "GetStatus", b"", timeout=seconds)
        assert refusal.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert wire.send("GetStatus", b"", timeout=1e8)


@pytest.mark.parametrize(("seconds", "nanos"), [(0, 0), (-1, 0), (-(2**63), -(2**31)), (0, -1)])
def test_a_time_that_is_over_is_told_as_over(wire: Wire, seconds: int, nanos: int) -> None:
    """In the messages, where gRPC's own deadline is not asked."""
    over = rpc.duration(0.0)
    over.seconds, over.nanos = seconds, nanos
    executed = wire.served.backend.steps["call"]
    assert wire.call("add", deadline=over).outcome == pb.TOOL_OUTCOME_DEADLINE
    assert wire.served.backend.steps["call"] == executed
    header = pb.GradeHeader(episode_id=wire.episode_id, deadline=over)
    graded = wire.grade(pb.GradeRequest(header=header))
    assert graded.no_grade.reason == pb.NO_GRADE_REASON_TIMEOUT
    with pytest.raises(Refused, match="budget must be positive"):
        wire.open("over", budget=over)


def test_a_time_of_ages_is_bounded_by_the_gateways_own(wire: Wire) -> None:
    ages = rpc.duration(0.0)
    ages.seconds, ages.nanos = 2**63 - 1, 2**31 - 1
    assert wire.call("look", deadline=ages).outcome == pb.TOOL_OUTCOME_OK
    ready = wire.open("ages", budget=ages)[-1]
    assert ready.ready.deadline.seconds <= wire.served.gateway.config.max_budget_s
    header = pb.GradeHeader(episode_id=ready.episode_id, deadline=ages)
    assert wire.grade(pb.GradeRequest(header=header)).reward == 1.0
    wire.close(ready.episode_id)


NUMBERS = st.integers() | st.floats()
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
TASK_FIELDS = [
    *("key", "task_key", "prompt", "env_id", "env_key", "version", "data_id", "data_version"),
    *("env_variables", "verifier_func", "task_modality"),
]


@given(changes=st.dictionaries(st.sampled_from(TASK_FIELDS), JSON, max_size=4))
@WIRE
def test_any_task_opens_or_is_refused_with_what_is_wrong(
    wire: Wire, changes: dict[str, Any]
) -> None:
    try:
        answers = wire.open(uuid.uuid4().hex, task_json=task_json(**changes))
    except Refused as refusal:
        assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
        assert refusal.reason in ("BAD_TASK", "UNKNOWN_ENVIRONMENT")
        assert refusal.error is not None and refusal.error.message
    else:
        assert answers[-1].state in (pb.EPISODE_STATE_READY, pb.EPISODE_STATE_FAILED)
        wire.close(answers[-1].episode_id)
        wait_until(lambda: len(wire.served.gateway.book) == 1)


@pytest.mark.parametrize(
    "text",
    [
        *("", "\ufeff{}", "[]", "null", "NaN", "{", '{"key": "a", "key": "b"}', "\0", "9" * 5000),
        *("[" * 100_000, '{"a":' * 50_000 + "1" + "}" * 50_000),
        task_json(prompt="\ud800"),
    ],
    ids=range(12),
)
def test_what_is_no_task_is_named_so(wire: Wire, text: str) -> None:
    with pytest.raises(Refused) as caught:
        wire.open("no task", task_json=text)
    assert (caught.value.code.name, caught.value.reason) == ("INVALID_ARGUMENT", "BAD_TASK")


def test_a_prompt_that_would_fill_the_answer_is_refused_with_its_size(wire: Wire) -> None:
    for changes in (
        {"prompt": "x" * 600_000},
        {"prompt": "\N{GRINNING FACE}" * 100_000},
        {"env_variables": {"A": "x" * 600_000}},
    ):
        text = json.dumps(json.loads(task_json(**changes)), ensure_ascii=False)
        with pytest.raises(Refused, match="bytes") as caught:
            wire.open("large", task_json=text)
        assert caught.value.reason == "BAD_TASK"
    largest = wire.open("largest", task_json=task_json(prompt="x" * 250_000))[-1]
    assert len(largest.ready.facts.prompt) == 250_000
    wire.close(largest.episode_id)


def _echo(wire: Wire) -> list[dict[str, Any]]:
    """The arguments of calls that reach the environment from now on."""
    seen: list[dict[str, Any]] = []

    async def answer(name: str, arguments: Any) -> CallResult:
        seen.append(arguments)
        return CallResult((Text("done"),))

    wire.served.backend.hook = answer
    return seen


@given(arguments=st.text() | JSON.map(json.dumps))
@WIRE
def test_any_arguments_reach_the_environment_whole_or_not_at_all(
    wire: Wire, arguments: str
) -> None:
    seen = _echo(wire)
    answer = wire.call("add", arguments)
    if answer.outcome == pb.TOOL_OUTCOME_OK:
        assert seen == [json.loads(arguments or "{}")]
    else:
        assert answer.outcome == pb.TOOL_OUTCOME_BAD_ARGUMENTS
        assert answer.parts[0].text
        assert not seen


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "not an object"),
        ('{"a": 1, "a": 1}', "the key 'a' is repeated"),
        ('{"a": Infinity}', "not a JSON number"),
        ('{"a": 1} {"b": 2}', "not JSON"),
        ("{'a': 1}", "not JSON"),
        ("[" * 10_000 + "]" * 10_000, ""),
        ('{"a":' * 10_000 + "1" + "}" * 10_000, "nested too deeply"),
        ('{"a": "\0"}', "not JSON"),
    ],
    ids=range(9),
)
def test_arguments_that_are_no_object_are_told_to_the_policy(
    wire: Wire, arguments: str, message: str
) -> None:
    seen = _echo(wire)
    answer = wire.call("add", arguments)
    assert answer.outcome == pb.TOOL_OUTCOME_BAD_ARGUMENTS
    assert message in answer.parts[0].text
    assert len(answer.parts[0].text) < 500
    assert not seen


def test_arguments_of_a_megabyte_reach_the_environment(wire: Wire) -> None:
    seen = _echo(wire)
    assert wire.call("add", json.dumps({"a": "x" * 10**6})).outcome == pb.TOOL_OUTCOME_OK
    assert seen == [{"a": "x" * 10**6}]


@pytest.mark.parametrize(
    "name", ["", "../add", "add\0", "add\n", "\u202edda", "a\u200bdd", "\N{ROCKET}", "a" * 10**5]
)
def test_a_name_that_only_looks_like_a_tools_is_none(wire: Wire, name: str) -> None:
    seen = _echo(wire)
    answer = wire.call(name)
    assert answer.outcome == pb.TOOL_OUTCOME_BAD_TOOL
    assert answer.parts[0].text.isprintable()
    assert not seen


HEADERS = st.builds(
    lambda text: pb.GradeRequest(header=pb.GradeHeader(episode_id=text)), st.text(max_size=20)
)
CHUNKS = st.builds(lambda data: pb.GradeRequest(transcript_chunk=data), st.binary(max_size=200))


@given(
    requests=st.lists(HEADERS | CHUNKS | st.just(pb.GradeRequest()), max_size=6),
    known=st.booleans(),
)
@WIRE
def test_any_sequence_of_chunks_is_a_grade_or_a_refusal(
    wire: Wire, requests: Sequence[pb.GradeRequest], known: bool
) -> None:
    if known:
        for request in requests:
            if request.HasField("header"):
                request.header.episode_id = wire.episode_id
    headers = [request.HasField("header") for request in requests]
    well_formed = headers[:1] == [True] and not any(headers[1:])
    try:
        graded = wire.grade(*requests)
    except Refused as refusal:
        assert refusal.reason == ("EPISODE_LOST" if well_formed else "BAD_REQUEST")
        assert not (well_formed and known)
    else:
        assert well_formed and known
        assert graded.reward == 1.0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def verify(env:", "does not compile"),
        ("\0", "does not compile"),
        ("(" * 100_000, "does not compile"),
        ("async def verify(env): ...", "async"),
        ("verify = print", "defines no function"),
    ],
    ids=range(5),
)
def test_a_verifier_that_is_none_is_no_grade(wire: Wire, source: str, message: str) -> None:
    episode_id = wire.open(uuid.uuid4().hex, task_json=task_json(verifier_func=source))[
        -1
    ].episode_id
    graded = wire.grade(pb.GradeRequest(header=pb.GradeHeader(episode_id=episode_id)))
    wire.close(episode_id)
    assert graded.WhichOneof("grade") == "no_grade"
    assert graded.no_grade.reason == pb.NO_GRADE_REASON_EXECUTION_FAILED
    assert message in graded.no_grade.detail


def test_a_transcript_beyond_the_limit_is_refused_with_the_setting(wire: Wire) -> None:
    header = pb.GradeRequest(header=pb.GradeHeader(episode_id=wire.episode_id))
    chunk = pb.GradeRequest(transcript_chunk=b"x" * 2**19)
    with pytest.raises(Refused, match=r"env_gateway\.limits\.transcript_bytes"):
        wire.grade(header, chunk, chunk, chunk)


def test_a_result_of_100_megabytes_is_fetched_in_chunks(wire: Wire) -> None:
    size = 100 * 2**20

    async def answer(name: str, arguments: Any) -> CallResult:
        return CallResult((Text("x" * size),))

    wire.served.backend.hook = answer
    media = wire.call("look").parts[0].media
    assert (media.data, media.size_bytes) == (b"", size)
    request = pb.FetchMediaRequest(episode_id=wire.episode_id, sha256=media.sha256)
    answers = wire.send("FetchMedia", request.SerializeToString(), timeout=20.0)
    chunks = [len(pb.FetchMediaResponse.FromString(answer).chunk) for answer in answers]
    assert (sum(chunks), max(chunks)) == (size, 2**20)


def test_text_is_passed_on_whatever_characters_it_has(wire: Wire) -> None:
    text = "\0\x1b[31m<|im_start|>system\n</s>\u202e\ufeff\x7f\N{ROCKET}"

    async def answer(name: str, arguments: Any) -> CallResult:
        return CallResult((Text(text), Text("\ud800")))

    wire.served.backend.hook = answer
    assert [part.text for part in wire.call("look").parts] == [text, "?"]
