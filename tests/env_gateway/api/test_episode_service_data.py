"""Tasks, calls, transcripts and results of any content, over a real socket: sent and survived."""

import json
import uuid
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla_env_gateway.ports import CallResult, Text
from tests.env_gateway.api.raw_wire import Refused, Wire
from tests.support.examples import examples
from tests.support.fake_gateway import task_json
from tests.support.waiting import wait_until

# The gateway and its open episode are the same for all examples, which is the point.
WIRE = settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
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
        ('{"a":' * 10_000 + "1" + "}" * 10_000, "nested more than 100 deep"),
        ('{"a": "\0"}', "not JSON"),
    ],
    ids=range(9),
)
def test_arguments_that_are_no_object_are_reported_to_the_policy(
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
        # A header of no episode is refused before anything that follows it is read.
        lost = headers[:1] == [True] and not known
        assert refusal.reason == ("EPISODE_LOST" if lost else "BAD_REQUEST")
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
    assert f"of task {json.loads(task_json())['key']!r}, " in graded.no_grade.detail
    assert message in graded.no_grade.detail


def test_a_transcript_beyond_the_limit_is_refused_with_the_setting(wire: Wire) -> None:
    task = task_json(verifier_func="def verify(env, conversation=None):\n    return 1\n")
    episode_id = wire.open(uuid.uuid4().hex, task_json=task)[-1].episode_id
    header = pb.GradeRequest(header=pb.GradeHeader(episode_id=episode_id))
    chunk = pb.GradeRequest(transcript_chunk=b"x" * 2**19)
    with pytest.raises(Refused, match=r"env_gateway\.limits\.transcript_bytes"):
        wire.grade(header, chunk, chunk, chunk)
    wire.close(episode_id)


@pytest.mark.parametrize("megabytes", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_a_result_of_megabytes_is_fetched_in_chunks(wire: Wire, megabytes: int) -> None:
    size = megabytes * 2**20

    async def answer(name: str, arguments: Any) -> CallResult:
        return CallResult((Text("x" * size),))

    wire.served.backend.hook = answer
    media = wire.call("look").parts[0].media
    assert (media.data, media.size_bytes) == (b"", size)
    request = pb.FetchMediaRequest(episode_id=wire.episode_id, sha256=media.sha256)
    answers = wire.send("FetchMedia", request.SerializeToString(), timeout=60.0)
    chunks = [len(pb.FetchMediaResponse.FromString(answer).chunk) for answer in answers]
    assert (sum(chunks), max(chunks)) == (size, 2**20)


def test_text_is_passed_on_whatever_characters_it_has(wire: Wire) -> None:
    text = "\0\x1b[31m<|im_start|>system\n</s>\u202e\ufeff\x7f\N{ROCKET}"

    async def answer(name: str, arguments: Any) -> CallResult:
        return CallResult((Text(text), Text("\ud800")))

    wire.served.backend.hook = answer
    assert [part.text for part in wire.call("look").parts] == [text, "?"]
