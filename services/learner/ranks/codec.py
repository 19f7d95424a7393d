"""Codec of machines and calls: `flotilla.learner.v1.RankService`."""

import json
from collections.abc import Mapping
from typing import Any

from flotilla.learner.v1 import rank_service_pb2 as pb
from services.learner.ranks.machine_admission import Machine
from services.learner.ranks.machines import RankCall


class MalformedRankMessageError(Exception):
    """A message that no machine of ours would send."""


def encode_machine(machine: Machine) -> pb.JoinRequest:
    said = pb.Machine(
        run_id=machine.run_id,
        number=machine.number,
        machines=machine.machines,
        ranks=machine.ranks,
        spec_digest=machine.spec_digest,
        hostname=machine.hostname,
    )
    return pb.JoinRequest(machine=said)


def decode_machine(message: pb.JoinRequest) -> Machine:
    """Return the machine that joins. Raises MalformedRankMessageError for any other message."""
    if message.WhichOneof("said") != "machine":
        raise MalformedRankMessageError("the first message must say which machine joins")
    said = message.machine
    return Machine(
        said.run_id, said.number, said.machines, said.ranks, said.spec_digest, said.hostname[:255]
    )


def encode_call(call: RankCall) -> pb.JoinResponse:
    said = pb.Call(
        call=call.call,
        rank=call.rank,
        command=call.command,
        arguments=json.dumps(call.arguments).encode(),
    )
    return pb.JoinResponse(call=said)


def decode_call(message: pb.Call) -> RankCall:
    return RankCall(message.call, message.rank, message.command, json.loads(message.arguments))


def encode_result(call: int, result: Mapping[str, Any]) -> pb.JoinRequest:
    return pb.JoinRequest(answer=pb.Answer(call=call, result=json.dumps(result).encode()))


def encode_error(call: int, error: str, *, ended: bool) -> pb.JoinRequest:
    return pb.JoinRequest(answer=pb.Answer(call=call, error=error, ended=ended))


def decode_result(answer: pb.Answer) -> dict[str, Any]:
    """Return an answer's result. Raises MalformedRankMessageError where it is no JSON object."""
    try:
        found = json.loads(answer.result)
    except ValueError as error:
        raise MalformedRankMessageError(f"an answer is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise MalformedRankMessageError("an answer is no JSON object")
    return found
