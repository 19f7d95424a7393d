"""The ledger across kills, and the registries that it remembers."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from structlog.testing import capture_logs

from flotilla.launcher.v1 import registry_service_pb2 as pb
from flotilla.launcher.v1 import registry_service_pb2_grpc
from flotilla_common.rpc import rpc
from flotilla_launcher.api.registry_server import GrpcRegistryHost
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.control import ledger_writer, run_end, transitions
from flotilla_launcher.control.actions import RunNote
from flotilla_launcher.state import (
    LEARNER,
    Cost,
    Outcome,
    Replica,
    ReplicaState,
    Run,
    RunState,
    TokenCount,
    Unit,
)
from flotilla_launcher.store.ledger import PROGRESS_KEPT, Ledger, LedgerError
from flotilla_launcher.store.operation_log import OperationState


def test_a_ledger_of_another_format_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "launcher.sqlite"
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(LedgerError, match=r"format 99.*Use the flotilla that wrote it"):
        Ledger(path)


@pytest.mark.parametrize("former", [6, 7])
def test_a_ledger_of_a_former_format_is_taken_over(tmp_path: Path, former: int) -> None:
    path = tmp_path / "launcher.sqlite"
    Ledger(path).close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE transitions (number INTEGER PRIMARY KEY, cause TEXT)")
        db.execute("INSERT INTO transitions (cause) VALUES ('of before')")
        db.execute(f"PRAGMA user_version = {former}")
        db.commit()
    store = Ledger(path)
    ended = write_a_life(store)
    stored = store.get_run("r")
    assert stored is not None and stored.run == ended
    store.close()
    assert rows(path, "SELECT cause FROM transitions") == [("of before",)]
    assert rows(path, "PRAGMA user_version") == [(8,)]


def rows(path: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute(query).fetchall()


def write_a_life(store: Ledger) -> Run:
    """Write a run that starts, whose learner fails, and that ends; return it as it ended."""
    before = Run("r", "demo", {LEARNER: 1})
    with store.transaction():
        store.begin_run(before, "{}", 1.0, {LEARNER: 2.5})
    run = transitions.mark_admitted(before).with_replicas([Replica(LEARNER, 0, due=77.5)])
    ledger_writer.write_run_change(store, before, run, [], "preflight passed", [(LEARNER, 0)])
    failed = run.with_replicas(
        [
            Replica(
                LEARNER,
                0,
                ReplicaState.RESTARTING,
                failures=(3.0, 4.0),
                attempt=2,
                setups=1,
                price=2.5,
                due=99.5,
                unit=Unit("u", 1, 2.0),
            )
        ]
    )
    tokens = {LEARNER: TokenCount(trained=3), "an incarnation": TokenCount(1, 2)}
    cost = Cost(1.5, 2.5, {LEARNER: 1.5}, TokenCount(1, 2, 3))
    failed = replace(failed, cost=cost, metered=5.0, tokens=tokens)
    ledger_writer.write_run_change(store, run, failed, [RunNote("x")], "exited with code 1", [])
    ended = run_end.end_run(failed, Outcome.DEADLINE, 10.0, LauncherConfig(drain_s=5.0), "enough")
    ledger_writer.write_run_change(store, failed, ended, [], "enough", [])
    return ended


def test_every_transition_is_logged_with_its_cause_and_deadlines_survive(tmp_path: Path) -> None:
    path = tmp_path / "launcher.sqlite"
    store = Ledger(path)
    with capture_logs() as logs:
        ended = write_a_life(store)
    store.close()
    store = Ledger(path)
    stored = store.get_run("r")
    assert stored is not None
    assert stored.run == ended
    assert stored.prices == {LEARNER: 2.5}
    logged = [line for line in logs if line["event"] == "transition"]
    assert {line["run_id"] for line in logged} == {"r"}
    assert [(line["subject"], line["old"], line["new"], line["cause"]) for line in logged] == [
        ("run", "preflight", "provisioning", "preflight passed"),
        ("learner-0", "", "starting", "preflight passed"),
        ("learner-0", "starting", "restarting", "exited with code 1"),
        ("run", "provisioning", "draining", "enough"),
        ("outcome", "", "deadline", "enough"),
    ]
    assert rows(path, "SELECT kind, name, state, arguments_json FROM operations") == [
        ("start", "learner-0", "intent", '{"attempt": 1}')
    ]
    operation = store.operations.find_open("r", "start", "learner-0")
    assert operation is not None
    assert operation.state is OperationState.INTENT
    store.operations.mark_state(operation.number, OperationState.DONE, "u")
    assert store.operations.find_open("r", "start", "learner-0") is None
    store.close()


class Registry(registry_service_pb2_grpc.RegistryServiceServicer):
    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        return pb.RegisterResponse()


def registries(runs: Path) -> GrpcRegistryHost:
    # The stubs declare methods abstract that need not exist.
    servicer: Any = Registry

    def add(run_id: str, server: grpc.aio.Server) -> None:
        registry_service_pb2_grpc.add_RegistryServiceServicer_to_server(servicer(), server)

    return GrpcRegistryHost(runs, add)


async def register(address: str, token: str) -> Any:
    async with rpc.channel(address, token=token) as channel:
        stub: Any = registry_service_pb2_grpc.RegistryServiceStub(channel)
        return await stub.Register(pb.RegisterRequest(run_id="a"), timeout=5.0)


async def test_a_run_has_a_token_of_its_own_and_its_successor_the_same_port_and_token(
    tmp_path: Path,
) -> None:
    first, config = registries(tmp_path), LauncherConfig()
    a = await first.open_registry("a", config, "")
    b = await first.open_registry("b", config, "")
    token, other = (
        a.secrets_for("learner")["FLOTILLA_TOKEN"],
        b.secrets_for("learner")["FLOTILLA_TOKEN"],
    )
    assert token != other
    await register(a.address, token)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await register(a.address, other)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    mode = (tmp_path / ".identity" / "a" / "token").stat().st_mode
    assert mode & 0o777 == 0o600
    await first.close("a", forget=False)
    second = registries(tmp_path)
    again = await second.open_registry("a", config, a.address)
    assert again.address == a.address
    assert again.secrets_for("learner") == a.secrets_for("learner")
    # The port is taken by now: services that do not find their launcher restart.
    moved = await second.open_registry("c", config, again.address)
    assert moved.address != again.address
    for run_id in ("a", "c"):
        await second.close(run_id, forget=True)
    await first.close("b", forget=True)
    assert list((tmp_path / ".identity").iterdir()) == []


def test_the_ledger_gives_back_what_was_written_and_bounds_progress(tmp_path: Path) -> None:
    store = Ledger(tmp_path / "launcher.sqlite")
    unit = Unit("r/rollout-0#1", 42, 7.5)
    addresses = "127.0.0.1:1", "127.0.0.1:2"
    replica = Replica("rollout", 0, ReplicaState.RUNNING, unit, "serving", *addresses, 2)
    run = Run("r", "demo", {"rollout": 1}, state=RunState.RUNNING)
    with store.transaction():
        store.begin_run(run, "{}", 1.0)
        store.save_run(run, [replica], None)
        for step in range(PROGRESS_KEPT + 200):
            store.add_event("r", 1.0, "progress", {"step": step})
    store.close()
    store = Ledger(tmp_path / "launcher.sqlite")
    stored = store.get_run("r")
    assert stored is not None
    assert stored.run.replicas[("rollout", 0)] == replica
    kept = store.list_events("r", 0, limit=10**6)
    assert PROGRESS_KEPT <= len(kept) <= PROGRESS_KEPT + 100
    assert kept[-1].number == PROGRESS_KEPT + 200
    store.close()
