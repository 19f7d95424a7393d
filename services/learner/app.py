"""Puts a learner together out of its parts, and runs it."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc.aio

from flotilla.learner.v1 import (
    group_service_pb2_grpc,
    policy_service_pb2_grpc,
    rank_service_pb2_grpc,
)
from services.common import rpc
from services.common.errors import ConfigError
from services.common.run_membership import RaisedAlarm
from services.common.run_membership import Status as ReplicaStatus
from services.common.runtime import Runtime
from services.learner.alarms.alarms import Alarms
from services.learner.api.decode import Limits
from services.learner.api.group_service import GroupService
from services.learner.api.policy_service import PolicyService
from services.learner.api.rank_service import RankService
from services.learner.checkpoints import remote_claim
from services.learner.checkpoints.export import export_newest
from services.learner.checkpoints.remote import NoUploads, elsewhere
from services.learner.checkpoints.remote_upload import Identity
from services.learner.checkpoints.remote_uploads import UploadedCheckpoints
from services.learner.config.learner import LearnerConfig
from services.learner.dependencies import Vendors
from services.learner.groups.dispatcher import Dispatcher
from services.learner.groups.restore import start_dispatcher
from services.learner.guard.guard import META, Guard
from services.learner.journal.connection import JournalError
from services.learner.journal.row_codec import accounts
from services.learner.journal.store import Journal, open_journal
from services.learner.ports import Ranks
from services.learner.ranks.machines import dismissed
from services.learner.run.clock import RunClock
from services.learner.run.context import Parts
from services.learner.run.eval_report import EvalSet
from services.learner.run.resume_checks import check_tasks_are_the_same, check_tokenizer_is_the_same
from services.learner.run.status import Phase, Status
from services.learner.run.task_files import load_task_files
from services.learner.run.train_loop import Loop
from services.learner.tracking.prometheus import shower
from services.learner.tracking.recorder import ALARMS_META, tracked_run
from services.learner.types import ModelInfo
from services.learner.weights.publisher import CANARY_TOLERANCE, Broadcast

# That one heartbeat carries.
_MOST_ALARMS = 64


async def run_learner(runtime: Runtime[LearnerConfig], vendors: Vendors) -> None:
    """Serve and train until the run is done or drained."""
    config = runtime.config
    tasks, eval_sets = load_task_files(config, runtime.shared.seed)
    try:
        journal = await asyncio.to_thread(open_journal, runtime.run_dir)
    except JournalError as error:
        raise ConfigError(str(error)) from error
    try:
        await check_tokenizer_is_the_same(journal, vendors.tokenizer)
        if config.mode == "train":
            await check_tasks_are_the_same(journal, tasks, config, runtime.shared.seed)
        place = elsewhere(vendors.store, runtime)
        await remote_claim.check(place, journal, runtime.run_id)
        dispatcher = await start_dispatcher(config, journal, tasks, runtime.shared.seed)
        who = Identity(runtime.run_id, dispatcher.run_epoch, runtime.incarnation)
        uploads = await remote_claim.begin(place, journal, who)
        try:
            done = await _serve(runtime, vendors, journal, dispatcher, eval_sets, uploads)
            if done and config.mode == "train":
                await export_newest(journal, runtime.run_dir, vendors.export)
            await uploads.finish(config.checkpoint.remote_exit_s)
        finally:
            uploads.close()
    finally:
        await journal.close()


async def _serve(
    runtime: Runtime[LearnerConfig],
    vendors: Vendors,
    journal: Journal,
    dispatcher: Dispatcher,
    eval_sets: list[EvalSet],
    uploads: NoUploads,
) -> bool:
    """True when the run is done, False when it was drained before."""
    config = runtime.config
    runtime.watchdog.limit_s = config.stall_s
    status = Status(total_steps=config.steps)
    limits: asyncio.Future[Limits] = asyncio.get_running_loop().create_future()
    broadcast = Broadcast(
        canary_tolerance=CANARY_TOLERANCE[runtime.shared.policy.dtype],
        attach_grace_s=config.attach_grace_s,
    )
    parts = await _parts(
        runtime, vendors, journal, dispatcher, broadcast, status, eval_sets, uploads
    )
    server = _server(runtime, vendors, parts, limits)
    async with runtime.serving(server) as serving:

        def loaded(info: ModelInfo) -> None:
            limits.set_result(Limits(info.vocab_size, runtime.shared.policy.max_model_len))
            serving.set_serving(True)

        runtime.report(lambda: _heartbeat(status, parts.alarms, serving=limits.done()))
        await runtime.announce(serving.address)
        runtime.log.info("serving", address=serving.address, run_epoch=dispatcher.run_epoch)
        loop = Loop(parts, on_loaded=loaded)
        try:
            with dismissed(vendors.roll):
                return await _run(loop, parts, runtime)
        finally:
            serving.set_serving(False)
            # Calls that wait would hold up the server's end.
            await dispatcher.drain()
            broadcast.close()


def _server(
    runtime: Runtime[LearnerConfig],
    vendors: Vendors,
    parts: Parts,
    limits: asyncio.Future[Limits],
) -> grpc.aio.Server:
    """All services, not started yet."""
    server = rpc.server(token=runtime.token)
    group_service_pb2_grpc.add_GroupServiceServicer_to_server(
        GroupService(
            parts.dispatcher,
            parts.status,
            limits,
            tokenizer=vendors.tokenizer,
            drain=runtime.drain,
            intake=runtime.config.intake,
        ),
        server,
    )
    policy_service_pb2_grpc.add_PolicyServiceServicer_to_server(
        PolicyService(
            parts.broadcast,
            parts.dispatcher,
            parts.guard,
            tokenizer=vendors.tokenizer,
            weight_server=vendors.weight_server,
            share_memory=runtime.config.weights.network == "private",
            publish_timeout_s=runtime.config.publish_timeout_s,
        ),
        server,
    )
    if vendors.roll is not None:
        service = RankService(vendors.roll, drain=runtime.drain)
        rank_service_pb2_grpc.add_RankServiceServicer_to_server(service, server)
    return server


async def _parts(
    runtime: Runtime[LearnerConfig],
    vendors: Vendors,
    journal: Journal,
    dispatcher: Dispatcher,
    broadcast: Broadcast,
    status: Status,
    eval_sets: list[EvalSet],
    uploads: NoUploads,
) -> Parts:
    config, run_epoch = runtime.config, dispatcher.run_epoch
    meta = await journal.meta()
    tracked = await tracked_run(journal)
    dispatcher.tally.received_before = (await journal.read(accounts))["acknowledged"]
    await asyncio.to_thread(vendors.tracker.open, tracked)
    alarms = _alarms(runtime, vendors, journal, meta.get(ALARMS_META, {}))
    status.flags = lambda: alarms.metrics
    return Parts(
        config=config,
        seed=runtime.shared.seed,
        run_dir=runtime.run_dir,
        ranks=vendors.ranks,
        journal=journal,
        dispatcher=dispatcher,
        broadcast=broadcast,
        guard=_guard(runtime, vendors.ranks, journal, run_epoch, meta.get(META, {})),
        snapshots=vendors.snapshots,
        checkpoints=_checkpoints(runtime, journal, uploads, run_epoch),
        uploads=uploads,
        eval_sets=eval_sets,
        tracker=vendors.tracker,
        tracked=tracked,
        alarms=alarms,
        status=status,
        clock=RunClock.resumed(meta.get("seconds", {})),
        watchdog=runtime.watchdog,
        drain=runtime.drain,
        told=lambda: runtime.told,
    )


def _checkpoints(
    runtime: Runtime[LearnerConfig], journal: Journal, uploads: NoUploads, run_epoch: int
) -> UploadedCheckpoints:
    return UploadedCheckpoints(
        uploads,
        runtime.run_dir,
        journal,
        run_id=runtime.run_id,
        run_epoch=run_epoch,
        keep=runtime.config.checkpoint.keep,
    )


def _guard(
    runtime: Runtime[LearnerConfig],
    ranks: Ranks,
    journal: Journal,
    run_epoch: int,
    state: dict[str, Any],
) -> Guard:
    config, policy = runtime.config, runtime.shared.policy
    return Guard(config, policy, ranks, journal, runtime.run_dir, run_epoch=run_epoch, state=state)


def _alarms(
    runtime: Runtime[LearnerConfig], vendors: Vendors, journal: Journal, remembered: dict[str, Any]
) -> Alarms:
    """Told of standstills and of damage, that of before included."""
    config = runtime.config
    alarms = Alarms(
        config.alarms,
        vendors.alarm_sinks,
        max_staleness=config.max_staleness,
        remembered=remembered,
    )
    alarms.on_change = runtime.hurry
    runtime.watchdog.on_standstill = alarms.standstill
    for incident in journal.incidents.newest:
        alarms.damage(incident)
    journal.incidents.on_report = alarms.damage
    return alarms


def _heartbeat(status: Status, alarms: Alarms, *, serving: bool) -> ReplicaStatus:
    """What a heartbeat says of the run as it is now."""
    raised = [
        RaisedAlarm(v.rule, v.scope, v.severity, alarm.step, v.cause, v.fix)
        for alarm in alarms.raised[:_MOST_ALARMS]
        for v in (alarm.verdict,)
    ]
    head = (status.phase, serving, status.step, status.total_steps)
    return ReplicaStatus(*head, metrics=status.metrics, alarms=raised)


async def _run(loop: Loop, parts: Parts, runtime: Runtime[LearnerConfig]) -> bool:
    """The loop, with what runs beside it; the first failure of any ends all. True when it is done,
    False when it was drained."""
    dispatcher, status = parts.dispatcher, parts.status
    main = asyncio.create_task(loop.run(), name="loop")
    beside = [
        asyncio.create_task(_every(min(1.0, dispatcher.book.rules.ttl_s / 4), dispatcher.expire)),
        asyncio.create_task(_when(runtime.drain, dispatcher.drain)),
        asyncio.create_task(parts.journal.broken()),
        asyncio.create_task(parts.guard.watch()),
        asyncio.create_task(parts.uploads.fenced()),
        asyncio.create_task(_show(shower(dispatcher, status, runtime.watchdog, parts.alarms))),
    ]
    try:
        running: set[asyncio.Task[Any]] = {main, *beside}
        while not main.done():
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        return main.result()
    except Exception as error:
        status.error = str(error)[:2000]
        parts.alarms.failed(status.error or repr(error))
        status.enter(Phase.FAILED)
        raise
    finally:
        for task in (main, *beside):
            task.cancel()
        await asyncio.gather(main, *beside, return_exceptions=True)


async def _show(show: Callable[[], None]) -> None:
    while True:
        show()
        await asyncio.sleep(1.0)


async def _every(seconds: float, work: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(seconds)
        await work()


async def _when(event: asyncio.Event, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await event.wait()
    await work()
