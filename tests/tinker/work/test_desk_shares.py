"""Fair shares of the engine and of the trainer, and many orders concurrently."""

import asyncio
import random
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from flotilla_tinker.types import Failure, Kind
from flotilla_tinker.work.limits import Limits
from tests.support.waiting import until
from tests.tinker.work.desk_doubles import (
    BASE,
    DEADLY,
    ScriptedEngine,
    ScriptedTrainer,
    an_order,
    create_order,
    sample_order,
)
from tests.tinker.work.shop import Shop, a_shop, read

TENANTS = ("ann", "bob", "cid")


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 4, 16)])
async def test_three_clients_get_equal_shares_of_the_engine(
    tmp_path: Path, sizes: tuple[int, int, int]
) -> None:
    # Slower than everything else, however busy the machine: the engine is what they share.
    engine = ScriptedEngine(max_num_seqs=16, pause_s=0.04)
    async with a_shop(tmp_path, engine=engine) as shop:
        done = Counter[str]()
        stop = asyncio.Event()

        async def keep_sampling(tenant: str, size: int, lane: int, session: str) -> None:
            seq = lane * 10**6
            while not stop.is_set():
                order = sample_order(BASE, seq, [hash(tenant) % 500], session, tenant, size)
                read(await shop.order(order))
                done[tenant] += size
                seq += 1

        async with asyncio.TaskGroup() as group:
            number = 0
            for tenant, size in zip(TENANTS, sizes, strict=True):
                session = await shop.desk.open_session(tenant, {})
                # The first client asks with the most orders open.
                for _ in range(48 // size + (48 if tenant == "ann" else 0)):
                    group.create_task(keep_sampling(tenant, size, number, session))
                    number += 1
            await until(lambda: sum(done.values()) > 300)
            done.clear()
            await until(lambda: sum(done.values()) > 1500)
            stop.set()
        fair = sum(done.values()) / 3
        assert all(abs(done[tenant] - fair) < 0.1 * fair for tenant in TENANTS), done
        assert engine.most_running <= 16


async def test_clients_share_the_trainer_by_tokens(tmp_path: Path) -> None:
    trainer = ScriptedTrainer(pause_s=0.0005)
    async with a_shop(tmp_path, trainer=trainer) as shop:
        models = dict[str, str]()
        ids = list[tuple[str, str]]()
        for tenant in TENANTS[:2]:
            session = await shop.desk.open_session(tenant, {})
            models[tenant] = f"{session}:train:0"
            read(await shop.order(create_order(session, tenant=tenant)))
        hold = trainer.gates[models["ann"]] = trainer.gates[models["bob"]] = asyncio.Event()
        for tenant, size in (("ann", 400), ("bob", 100)):
            session = models[tenant].split(":")[0]
            for seq in range(1, 61):
                body = [seq] * size
                order = an_order(
                    Kind.FORWARD_BACKWARD, session, models[tenant], seq, tenant, tokens=body
                )
                ids.append((tenant, (await shop.desk.submit(order)).request_id))
        before = len(trainer.calls)
        hold.set()
        for tenant, request_id in ids:
            read(await shop.result_of(request_id, tenant))
        # While both have orders, four small ones of the one run for each large one of the other.
        first = [model for model, _ in trainer.calls[before : before + 60]]
        assert 9 <= first.count(models["ann"]) <= 15


async def test_a_thousand_samples_wait_cheaply(tmp_path: Path) -> None:
    engine = ScriptedEngine(max_num_seqs=64, gate=asyncio.Event())
    async with a_shop(tmp_path, engine=engine) as shop:
        statements = list[str]()
        store = shop.desk.store
        await store.run(lambda db: db.set_trace_callback(statements.append))
        orders = [sample_order(BASE, seq, [seq], shop.session) for seq in range(1024)]
        accepted = await asyncio.gather(*map(shop.desk.submit, orders))
        await until(lambda: engine.running == 64)
        # One task for each that runs, and none for those that wait.
        assert len(asyncio.all_tasks()) < 64 + 16
        assert engine.gate
        engine.gate.set()
        outcomes = await asyncio.gather(*(shop.result_of(each.request_id) for each in accepted))
        assert not [each for each in outcomes if isinstance(each, Failure)]
        await store.run(lambda db: db.set_trace_callback(None))
        assert engine.most_running == 64
        assert len(engine.sampled) == 1024
        assert statements.count("COMMIT") < 150


async def test_more_samplers_than_the_engine_holds_take_turns(tmp_path: Path) -> None:
    engine = ScriptedEngine(max_samplers=2, pause_s=0.001)
    async with a_shop(tmp_path, engine=engine) as shop:
        model = await shop.model()
        for number in range(5):
            body = {"path_name": None, "sampling_session_seq_id": number}
            read(await shop.train(model, Kind.SAVE_WEIGHTS_FOR_SAMPLER, 2 * number + 1, **body))
            read(await shop.train(model, Kind.OPTIM_STEP, 2 * number + 2))
        orders = [
            sample_order(f"{shop.session}:sample:{seq % 5}", seq, [seq]) for seq in range(100)
        ]
        random.shuffle(orders)
        outcomes = [read(each) for each in await asyncio.gather(*map(shop.order, orders))]
        labels = Counter(outcome[0]["spans"][0][0] for outcome in outcomes)
        assert labels == {f"{model}@{number}": 20 for number in range(5)}
        assert len(engine.samplers) <= 2


async def sample_through_losses(shop: Shop) -> None:
    """Sample while the engine is lost again and again."""
    orders = [sample_order(BASE, seq, [seq + 700], shop.session) for seq in range(200)]

    async def lose() -> None:
        for _ in range(20):
            await asyncio.sleep(0.01)
            shop.engine.away = True
            await asyncio.sleep(0.005)
            shop.engine.lose_all()
            shop.engine.away = False

    *outcomes, _ = await asyncio.gather(*map(shop.order, orders), lose())
    assert all(read(outcome) for outcome in outcomes if outcome)


async def test_one_deadly_sample_among_many_is_found(tmp_path: Path) -> None:
    engine = ScriptedEngine(max_num_seqs=64, pause_s=0.01)
    async with a_shop(tmp_path, engine=engine) as shop:
        orders = [sample_order(BASE, seq, [seq + 1], shop.session) for seq in range(100)]
        deadly = sample_order(BASE, 100, [DEADLY], shop.session)
        failure, *outcomes = await asyncio.gather(*map(shop.order, (deadly, *orders)))
        assert isinstance(failure, Failure)
        assert "died 3 times while it did" in failure.message
        assert all(read(outcome) for outcome in outcomes)
        assert engine.deaths == 3


async def test_samples_survive_the_losses_of_the_engine(tmp_path: Path) -> None:
    engine = ScriptedEngine(max_num_seqs=16, pause_s=0.004)
    limits = Limits(most_deaths=1000, free_disk_bytes=0)
    async with a_shop(tmp_path, limits, engine=engine) as shop:
        await sample_through_losses(shop)
    with sqlite3.connect(tmp_path / "tinker.sqlite") as db:
        states = db.execute("SELECT state, count(*) FROM orders GROUP BY state").fetchall()
    db.close()
    assert states == [("done", 200)]


async def test_weights_that_the_engine_forgets_while_they_are_opened_are_used(
    tmp_path: Path,
) -> None:
    engine = ScriptedEngine(max_num_seqs=16, latency_s=0.001)
    limits = Limits(most_deaths=1000, free_disk_bytes=0)
    async with a_shop(tmp_path, limits, engine=engine) as shop:

        async def forget() -> None:
            for _ in range(200):
                await asyncio.sleep(random.choice((0, 0.0005)))
                shop.engine.lose_all()

        orders = [sample_order(BASE, seq, [seq + 1], shop.session) for seq in range(100)]
        *outcomes, _ = await asyncio.gather(*map(shop.order, orders), forget())
        assert all(read(outcome) for outcome in outcomes if outcome)
