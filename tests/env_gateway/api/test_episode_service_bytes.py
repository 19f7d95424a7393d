"""A running gateway answers any bytes with a precise status and loses nothing."""

import os
import socket
import struct
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla_common.rpc import rpc, rpc_options
from tests.env_gateway.api.raw_wire import AUTHORIZED, METHODS, SERVICE, Refused, Wire
from tests.support.examples import examples
from tests.support.threaded_gateway import TOKEN

# Without Drain, whose every message ends the gateway.
NAMES = sorted(set(METHODS) - {"Drain"})
# With a string as their first field.
WITH_TEXT = sorted(set(NAMES) - {"Grade", "WatchCapacity", "GetStatus"})
OURS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
}


# The gateway and its open episode are the same for all examples, which is the point.
WIRE = settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


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
    size = rpc_options.MAX_MESSAGE_BYTES + extra
    message = pb.OpenEpisodeRequest(task_json="x" * (size - frame)).SerializeToString()
    assert len(message) == size
    assert refused(wire, "OpenEpisode", message).code.name == code


@pytest.mark.parametrize("field", ["request_id", "run_id", "group_id", "worker_id"])
def test_an_id_that_would_fill_memory_and_logs_is_refused_by_its_name(
    wire: Wire, field: str
) -> None:
    request = pb.OpenEpisodeRequest()
    setattr(request, field, "x" * 900_000)
    refusal = refused(wire, "OpenEpisode", request.SerializeToString())
    assert (refusal.code.name, refusal.reason) == ("INVALID_ARGUMENT", "ID_TOO_LONG")
    assert f"{field} has 900000 characters" in str(refusal)
    assert len(str(refusal)) < 300


@pytest.mark.parametrize(
    ("name", "make_request"),
    [
        ("CallTool", lambda id_: pb.CallToolRequest(episode_id=id_)),
        ("Grade", lambda id_: pb.GradeRequest(header=pb.GradeHeader(episode_id=id_))),
        ("RenewEpisodes", lambda id_: pb.RenewEpisodesRequest(worker_id=id_)),
        ("RenewEpisodes", lambda id_: pb.RenewEpisodesRequest(episode_ids=["e", id_])),
        ("CloseEpisode", lambda id_: pb.CloseEpisodeRequest(episode_id=id_)),
        ("FetchMedia", lambda id_: pb.FetchMediaRequest(episode_id=id_)),
    ],
)
def test_every_request_is_refused_for_an_id_of_more_than_200_characters(
    wire: Wire, name: str, make_request: Callable[[str], Message]
) -> None:
    refusal = refused(wire, name, make_request("x" * 201).SerializeToString())
    assert (refusal.code.name, refusal.reason) == ("INVALID_ARGUMENT", "ID_TOO_LONG")
    try:
        wire.send(name, make_request("x" * 200).SerializeToString())
    except Refused as refusal:
        assert refusal.reason == "EPISODE_LOST"


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
def test_a_time_that_is_over_is_reported_as_over(wire: Wire, seconds: int, nanos: int) -> None:
    """The time is in the messages, where gRPC's own deadline does not apply."""
    over = rpc.to_duration(0.0)
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
    ages = rpc.to_duration(0.0)
    ages.seconds, ages.nanos = 2**63 - 1, 2**31 - 1
    assert wire.call("look", deadline=ages).outcome == pb.TOOL_OUTCOME_OK
    ready = wire.open("ages", budget=ages)[-1]
    assert ready.ready.deadline.seconds <= wire.served.gateway.config.max_budget_s
    header = pb.GradeHeader(episode_id=ready.episode_id, deadline=ages)
    assert wire.grade(pb.GradeRequest(header=header)).reward == 1.0
    wire.close(ready.episode_id)
