"""Probe of collectives: processes like the ranks and engines join one group and pass tensors
around.

They all run on this machine or, where nodes are named, one here and one on each node."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio

from services.common.aio.concurrency import running_tasks, wait_for_any
from services.common.process.arguments import TOKEN_VARIABLE
from services.common.rpc import rpc
from services.common.rpc.errors import ConfigError
from services.common.rpc.network_addresses import is_loopback, split_host_port
from services.common.weights.network_interfaces import own_address
from services.launcher.backends.local.gpu_reservations import visible_gpus
from services.launcher.doctor.echo_server import RING, SERVICE
from services.launcher.doctor.findings import Finding, fail, ok, warn
from services.launcher.doctor.network_check import listen_on
from services.launcher.doctor.node_echo import IDENTITY_FIX, NO_TOKEN, explain_refusal
from services.launcher.doctor.probe_process import run_command
from services.launcher.doctor.ring_rank import (
    LIMIT_S,
    RankAssignment,
    RankOutcome,
    parse_outcome,
    run_rank,
)
from services.launcher.doctor.run_context import RunContext
from services.launcher.state import LEARNER, ROLLOUT

_MOST, _LEAST = 3, 2
_HOST = "127.0.0.1"
# Time for the other ranks to report after one has failed.
_GRACE_S = 2.0
_CALL_S = LIMIT_S + 5.0
_TORCH = "import importlib.metadata as m; print(m.version('torch'))"
_ADDRESSES = "write HOST:PORT, of hosts that this machine finds"


@dataclass(frozen=True, slots=True)
class _RankReport:
    """Report of one rank; `refused` if its node did not even begin."""

    who: str
    outcome: RankOutcome
    refused: Finding | None = None

    @property
    def went_wrong(self) -> bool:
        return self.refused is not None or self.outcome.wrong != ""


async def probe_ring(context: RunContext) -> list[Finding]:
    nodes = tuple(dict.fromkeys(context.nodes))
    context = replace(context, nodes=nodes)
    if nodes and not context.environ.get(TOKEN_VARIABLE):
        return [NO_TOKEN]
    gpus, python = _assign_gpus(context, nodes), context.find_interpreter("torch")
    try:
        host = await asyncio.to_thread(_host_towards, nodes)
        door = listen_on(host)
    except (ConfigError, OSError) as error:
        return [fail(f"{', '.join(nodes) or _HOST}: {error}", _ADDRESSES)]
    with door:
        at = door.getsockname()[1]
        assignments = [
            RankAssignment(rank, len(gpus), host, at, gpu) for rank, gpu in enumerate(gpus)
        ]
        members = [_run_here(python, context, assignments[0], door.fileno())]
        if nodes:
            members += [
                _run_on_node(*each, context) for each in zip(nodes, assignments[1:], strict=True)
            ]
        else:
            members += [_run_here(python, context, assignment) for assignment in assignments[1:]]
        started = time.monotonic()
        rank_reports = await _until_one_fails(members)
        took = time.monotonic() - started
    return await _judge_reports(rank_reports, assignments[0], took, python, context)


def _assign_gpus(context: RunContext, nodes: Sequence[str]) -> list[int | None]:
    """Assign a GPU to each rank if GPUs are wanted: all on this machine, or one on every node."""
    rank = context.get_section(LEARNER)["rank"]
    wanted = rank["device"] == "cuda"
    if nodes:
        return [0 if wanted else None] * (len(nodes) + 1)
    planned = rank["processes"] + context.plan.config.replica_counts()[ROLLOUT]
    world = max(_LEAST, min(_MOST, planned))
    seen = len(visible_gpus()) if wanted else 0
    return list(range(min(world, seen))) if seen >= _LEAST else [None] * world


def _host_towards(nodes: Sequence[str]) -> str:
    """Return the address at which nodes reach this machine. Raises ConfigError, OSError."""
    own = [own_address(split_host_port(node, "node")[0]) for node in nodes]
    # From loopback a machine reaches its other addresses as well; others do not reach loopback.
    return min(own, key=is_loopback, default=_HOST)


async def _run_here(
    python: str, context: RunContext, assignment: RankAssignment, listener: int | None = None
) -> _RankReport:
    who = f"rank {assignment.rank}{' here' if context.nodes else ''}"
    return _RankReport(who, await run_rank(python, assignment, context.environ, listener))


async def _run_on_node(node: str, assignment: RankAssignment, context: RunContext) -> _RankReport:
    """Run a rank on a node, by its echo."""
    who, nothing = f"rank {assignment.rank} on {node}", RankOutcome()
    try:
        async with rpc.channel(
            node,
            token=context.environ[TOKEN_VARIABLE],
            tls=context.tls,
            peer=LEARNER,
            wait_for_ready=False,
        ) as channel:
            call: Any = channel.unary_unary(f"/{SERVICE}/{RING}")
            return _RankReport(
                who, parse_outcome(await call(assignment.to_bytes(), timeout=_CALL_S))
            )
    except ConfigError as error:
        return _RankReport(who, nothing, fail(f"{node}: {error}", IDENTITY_FIX))
    except grpc.aio.AioRpcError as error:
        return _RankReport(who, nothing, explain_refusal(node, error))
    except ValueError:
        wrong = fail(f"{node} answers with something else", "see what listens there")
        return _RankReport(who, nothing, wrong)


async def _until_one_fails(
    members: Sequence[Coroutine[Any, Any, _RankReport]],
) -> list[_RankReport]:
    """Collect the reports in the order in which ranks ended: all of them, or those up to
    shortly after the first failure. The remaining ranks are cancelled."""
    reports: list[_RankReport] = []
    async with running_tasks(*members) as tasks:
        running = list(tasks)
        while running and not any(each.went_wrong for each in reports):
            await wait_for_any(running)
            reports += _take_results(running)
        if running:
            await asyncio.wait(running, timeout=_GRACE_S)
            reports += _take_results(running)
    return reports


def _take_results(running: list[asyncio.Task[_RankReport]]) -> list[_RankReport]:
    """Remove the tasks that are done from `running`; return their results."""
    done = [task for task in running if task.done()]
    running[:] = [task for task in running if not task.done()]
    return [task.result() for task in done]


async def _judge_reports(
    rank_reports: Sequence[_RankReport],
    first: RankAssignment,
    took: float,
    python: str,
    context: RunContext,
) -> list[Finding]:
    refused = [each.refused for each in rank_reports if each.refused is not None]
    if refused:
        return refused
    wrong = [each for each in rank_reports if each.went_wrong]
    if not wrong:
        what = f"{rank_reports[0].outcome.how} ring of {first.world} processes"
        where = f", here and on {', '.join(context.nodes)}," if context.nodes else ""
        passed = ok(f"{what}{where} passed a tensor around in {took:.1f} s")
        return [passed, *_compare_torch_versions(rank_reports)]
    found = _find_causes(wrong, first, context)
    own = [await _report_own_torch(python, context)] if context.nodes else []
    return [*found, *_compare_torch_versions([*rank_reports, *own])]


def _find_causes(
    wrong: Sequence[_RankReport], first: RankAssignment, context: RunContext
) -> list[Finding]:
    """Return the causes: blocked connections, if there are any, because other errors follow
    from them; else the first error."""
    causes = [each for each in wrong if each.outcome.blocked] or wrong[:1]
    name = f"{'gloo' if first.gpu is None else 'nccl'} ring of {first.world}"
    if len(context.nodes) > 1:
        seated = (f"rank {rank} on {node}" for rank, node in enumerate(context.nodes, 1))
        name = f"{name} of {', '.join(['rank 0 here', *seated])}"
    return [fail(f"{name}: {each.who}: {each.outcome.wrong}", each.outcome.fix) for each in causes]


async def _report_own_torch(python: str, context: RunContext) -> _RankReport:
    """Report the torch version of rank 0, which may have been ended before it reported."""
    code, output, _ = await run_command((python, "-c", _TORCH), b"", context.environ)
    return _RankReport("rank 0 here", RankOutcome(torch=output.strip() if code == 0 else ""))


def _compare_torch_versions(rank_reports: Sequence[_RankReport]) -> list[Finding]:
    """Warn of differing torch versions; builds for CPU and for CUDA may be one version."""
    versions = {each.who: each.outcome.torch for each in rank_reports if each.outcome.torch}
    if len({version.partition("+")[0] for version in versions.values()}) < 2:
        return []
    listed = ", ".join(f"{who} has {version}" for who, version in sorted(versions.items()))
    return [warn(f"versions of torch differ: {listed}", "install one version on all nodes")]
