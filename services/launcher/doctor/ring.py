"""Whether processes as the ranks and engines are can join one group and pass tensors around.

They are all on this machine, or, where nodes are named, one here and one on each of them.
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio

from services.common import rpc
from services.common.arguments import TOKEN_VARIABLE
from services.common.errors import ConfigError
from services.common.network import is_loopback, split
from services.launcher.backends.local.backend import visible_gpus
from services.launcher.doctor.echo_server import RING, SERVICE
from services.launcher.doctor.findings import Finding, fail, ok, warn
from services.launcher.doctor.network_check import listen, own_address
from services.launcher.doctor.node_echo import IDENTITY, NO_TOKEN, refusal
from services.launcher.doctor.probe_process import output_of
from services.launcher.doctor.ring_rank import LIMIT_S, Outcome, Seat, outcome_from, sit
from services.launcher.doctor.run_context import Subject
from services.launcher.state import LEARNER, ROLLOUT

_MOST, _LEAST = 3, 2
_HOST = "127.0.0.1"
# After one rank has failed, the others have this long to say what they see of it.
_GRACE_S = 2.0
_CALL_S = LIMIT_S + 5.0
_TORCH = "import importlib.metadata as m; print(m.version('torch'))"
_ADDRESSES = "write HOST:PORT, of hosts that this machine finds"


@dataclass(frozen=True, slots=True)
class _Told:
    """What came of one rank; `refused` where its node did not even begin."""

    who: str
    outcome: Outcome
    refused: Finding | None = None

    @property
    def went_wrong(self) -> bool:
        return self.refused is not None or self.outcome.wrong != ""


async def ring(subject: Subject) -> list[Finding]:
    nodes = tuple(dict.fromkeys(subject.nodes))
    subject = replace(subject, nodes=nodes)
    if nodes and not subject.environ.get(TOKEN_VARIABLE):
        return [NO_TOKEN]
    gpus, python = _gpus(subject, nodes), subject.interpreter("torch")
    try:
        host = await asyncio.to_thread(_host_towards, nodes)
        door = listen(host)
    except (ConfigError, OSError) as error:
        return [fail(f"{', '.join(nodes) or _HOST}: {error}", _ADDRESSES)]
    with door:
        at = door.getsockname()[1]
        seats = [Seat(rank, len(gpus), host, at, gpu) for rank, gpu in enumerate(gpus)]
        members = [_here(python, subject, seats[0], door.fileno())]
        if nodes:
            members += [_there(*each, subject) for each in zip(nodes, seats[1:], strict=True)]
        else:
            members += [_here(python, subject, seat) for seat in seats[1:]]
        started = time.monotonic()
        told = await _until_one_fails(members)
        took = time.monotonic() - started
    return await _judged(told, seats[0], took, python, subject)


def _gpus(subject: Subject, nodes: Sequence[str]) -> list[int | None]:
    """For each rank the GPU that it takes, if they are to: all here, or one on every node."""
    rank = subject.section(LEARNER)["rank"]
    wanted = rank["device"] == "cuda"
    if nodes:
        return [0 if wanted else None] * (len(nodes) + 1)
    planned = rank["processes"] + subject.plan.config.replicas()[ROLLOUT]
    world = max(_LEAST, min(_MOST, planned))
    seen = len(visible_gpus()) if wanted else 0
    return list(range(min(world, seen))) if seen >= _LEAST else [None] * world


def _host_towards(nodes: Sequence[str]) -> str:
    """Where nodes find this machine. Raises ConfigError, OSError."""
    own = [own_address(split(node, "node")[0]) for node in nodes]
    # From loopback a machine reaches its other addresses as well; others do not reach loopback.
    return min(own, key=is_loopback, default=_HOST)


async def _here(python: str, subject: Subject, seat: Seat, listener: int | None = None) -> _Told:
    who = f"rank {seat.rank}{' here' if subject.nodes else ''}"
    return _Told(who, await sit(python, seat, subject.environ, listener))


async def _there(node: str, seat: Seat, subject: Subject) -> _Told:
    """A rank that a node's echo is."""
    who, nothing = f"rank {seat.rank} on {node}", Outcome()
    try:
        async with rpc.channel(
            node,
            token=subject.environ[TOKEN_VARIABLE],
            tls=subject.tls,
            peer=LEARNER,
            wait_for_ready=False,
        ) as channel:
            call: Any = channel.unary_unary(f"/{SERVICE}/{RING}")
            return _Told(who, outcome_from(await call(seat.to_bytes(), timeout=_CALL_S)))
    except ConfigError as error:
        return _Told(who, nothing, fail(f"{node}: {error}", IDENTITY))
    except grpc.aio.AioRpcError as error:
        return _Told(who, nothing, refusal(node, error))
    except ValueError:
        wrong = fail(f"{node} answers with something else", "see what listens there")
        return _Told(who, nothing, wrong)


async def _until_one_fails(members: Sequence[Coroutine[Any, Any, _Told]]) -> list[_Told]:
    """What the ranks told, in the order in which they ended: all, or those until shortly after
    one has failed. The others are ended."""
    tasks = {asyncio.ensure_future(member) for member in members}
    told: list[_Told] = []
    try:
        running = tasks
        while running and not any(each.went_wrong for each in told):
            ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            told += [task.result() for task in ended]
        if running:
            ended, _ = await asyncio.wait(running, timeout=_GRACE_S)
            told += [task.result() for task in ended]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return told


async def _judged(
    told: Sequence[_Told], first: Seat, took: float, python: str, subject: Subject
) -> list[Finding]:
    refused = [each.refused for each in told if each.refused is not None]
    if refused:
        return refused
    wrong = [each for each in told if each.went_wrong]
    if not wrong:
        what = f"{told[0].outcome.how} ring of {first.world} processes"
        where = f", here and on {', '.join(subject.nodes)}," if subject.nodes else ""
        passed = ok(f"{what}{where} passed a tensor around in {took:.1f} s")
        return [passed, *_differing(told)]
    found = _causes(wrong, first, subject)
    own = [await _own(python, subject)] if subject.nodes else []
    return [*found, *_differing([*told, *own])]


def _causes(wrong: Sequence[_Told], first: Seat, subject: Subject) -> list[Finding]:
    """Where a way is blocked, what others meet with comes of that; else the first is the cause."""
    causes = [each for each in wrong if each.outcome.blocked] or wrong[:1]
    name = f"{'gloo' if first.gpu is None else 'nccl'} ring of {first.world}"
    if len(subject.nodes) > 1:
        seated = (f"rank {rank} on {node}" for rank, node in enumerate(subject.nodes, 1))
        name = f"{name} of {', '.join(['rank 0 here', *seated])}"
    return [fail(f"{name}: {each.who}: {each.outcome.wrong}", each.outcome.fix) for each in causes]


async def _own(python: str, subject: Subject) -> _Told:
    """The version of torch that rank 0 has: it may have been ended before it told."""
    code, output, _ = await output_of((python, "-c", _TORCH), b"", subject.environ)
    return _Told("rank 0 here", Outcome(torch=output.strip() if code == 0 else ""))


def _differing(told: Sequence[_Told]) -> list[Finding]:
    """What is for CPUs and for CUDA may be one version."""
    versions = {each.who: each.outcome.torch for each in told if each.outcome.torch}
    if len({version.partition("+")[0] for version in versions.values()}) < 2:
        return []
    listed = ", ".join(f"{who} has {version}" for who, version in sorted(versions.items()))
    return [warn(f"versions of torch differ: {listed}", "install one version on all nodes")]
