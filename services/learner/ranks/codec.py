"""Machines and calls as `flotilla.learner.v1.RankService` says them."""

import json
from collections.abc import Mapping
from typing import Any

from flotilla.learner.v1 import rank_service_pb2 as pb
from services.learner.ranks.machine_admission import Machine
from services.learner.ranks.machines import Call


class MalformedError(Exception):
    """What no machine of ours would say."""


def machine_message(machine: Machine) -> pb.JoinRequest:
    said = pb.Machine(
        run_id=machine.run_id,
        number=machine.number,
        machines=machine.machines,
        ranks=machine.ranks,
        spec_digest=machine.spec_digest,
        hostname=machine.hostname,
    )
    return pb.JoinRequest(machine=said)


def machine(message: pb.JoinRequest) -> Machine:
    """Raises MalformedError where it says something else."""
    if message.WhichOneof("said") != "machine":
        raise MalformedError("the first message must say which machine joins")
    said = message.machine
    return Machine(
        said.run_id, said.number, said.machines, said.ranks, said.spec_digest, said.hostname[:255]
    )


def call_message(call: Call) -> pb.JoinResponse:
    said = pb.Call(
        call=call.call,
        rank=call.rank,
        command=call.command,
        arguments=json.dumps(call.arguments).encode(),
    )
    return pb.JoinResponse(call=said)


def call(message: pb.Call) -> Call:
    return Call(message.call, message.rank, message.command, json.loads(message.arguments))


def result_message(call: int, result: Mapping[str, Any]) -> pb.JoinRequest:
    return pb.JoinRequest(answer=pb.Answer(call=call, result=json.dumps(result).encode()))


def error_message(call: int, error: str, *, ended: bool) -> pb.JoinRequest:
    return pb.JoinRequest(answer=pb.Answer(call=call, error=error, ended=ended))


def result(answer: pb.Answer) -> dict[str, Any]:
    """Raises MalformedError where it is no JSON object."""
    try:
        found = json.loads(answer.result)
    except ValueError as error:
        raise MalformedError(f"an answer is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise MalformedError("an answer is no JSON object")
    return found
