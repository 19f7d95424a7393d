"""What a model becomes when the trainer or this process is lost: what it would have become."""

import random
from pathlib import Path
from typing import Any

import pytest

from flotilla_tinker.types import Failure, Kind, Pending, SamplerWeights
from flotilla_tinker.work.limits import Limits
from tests.support.waiting import until
from tests.tinker.work.desk_doubles import (
    REFUSED,
    ScriptedEngine,
    ScriptedTrainer,
    an_order,
    sample_order,
)
from tests.tinker.work.shop import Shop, a_shop, read

K = Kind
LIMITS = Limits(recovery_updates=3, free_disk_bytes=0)


def some_work(seed: int) -> list[tuple[Kind, dict[str, Any]]]:
    """Orders of one model in random order, some of which are refused."""
    choose = random.Random(seed)
    orders = list[tuple[Kind, dict[str, Any]]]()
    saved = list[str]()
    for number in range(60):
        kind = choose.choice([K.FORWARD_BACKWARD] * 4 + [K.OPTIM_STEP] * 3 + [K.FORWARD] + [
            K.SAVE_WEIGHTS, K.LOAD_WEIGHTS
        ])  # fmt: skip
        if kind is K.SAVE_WEIGHTS:
            saved.append(f"w{number}")
            orders.append((kind, {"path_name": saved[-1]}))
        elif kind is K.LOAD_WEIGHTS and saved:
            path = f"MODEL/weights/{choose.choice(saved)}"
            orders.append((kind, {"path": path, "with_optimizer": choose.random() < 0.5}))
        elif kind is K.OPTIM_STEP:
            orders.append((kind, {"learning_rate": choose.random()}))
        else:
            token = REFUSED if choose.random() < 0.1 else number + 1000
            orders.append(
                (K.FORWARD_BACKWARD, {"tokens": [token], "forward_only": kind is K.FORWARD})
            )
    return orders


async def carry_out(shop: Shop, orders: list[tuple[Kind, dict[str, Any]]], *, lose: bool) -> Any:
    model = await shop.model()
    outcomes = list[str]()
    for seq, (kind, body) in enumerate(orders, 1):
        if lose and random.random() < 0.3:
            shop.trainer.lose_all()
        changed = {
            key: value.replace("MODEL", f"tinker://{model}") if key == "path" else value
            for key, value in body.items()
        }
        outcome = await shop.train(model, kind, seq, **changed)
        text = outcome.message if isinstance(outcome, Failure) else outcome.body.decode()
        outcomes.append(text.replace(shop.session, "SESSION"))
    return outcomes


@pytest.mark.parametrize("seed", range(6))
async def test_a_model_that_was_lost_again_and_again_is_what_it_would_have_been(
    tmp_path: Path, seed: int
) -> None:
    orders = some_work(seed)
    async with a_shop(tmp_path / "calm", LIMITS) as shop:
        expected = await carry_out(shop, orders, lose=False)
    async with a_shop(tmp_path / "lost", LIMITS) as shop:
        assert await carry_out(shop, orders, lose=True) == expected


async def test_a_recovery_point_bounds_what_is_repeated_and_kept(tmp_path: Path) -> None:
    async with a_shop(tmp_path, LIMITS) as shop:
        model = await shop.model()
        for seq in range(1, 15):
            kind = K.OPTIM_STEP if seq % 2 == 0 else K.FORWARD_BACKWARD
            read(await shop.train(model, kind, seq, **({} if seq % 2 == 0 else {"tokens": [seq]})))
        store = shop.desk.store
        kept = await store.run(lambda db: db.execute("SELECT count(*) FROM bodies").fetchone()[0])
        assert kept == 2
        assert len(list((tmp_path / "weights").iterdir())) == 1
        shop.trainer.lose_all()
        shop.trainer.calls.clear()
        read(await shop.train(model, K.FORWARD_BACKWARD, 15, tokens=[1]))
        calls = [call for _, call in shop.trainer.calls]
        assert calls == [
            "backward 15",
            *("create", "load 1", "backward 2", "update 3"),
            "backward 4",
        ]


async def test_a_restart_takes_up_models_samplers_and_open_orders(tmp_path: Path) -> None:
    trainer, engine = ScriptedTrainer(), ScriptedEngine()
    async with a_shop(tmp_path, LIMITS, trainer, engine) as shop:
        model = await shop.model()
        read(await shop.train(model, K.FORWARD_BACKWARD, 1, tokens=[1]))
        body: dict[str, Any] = {"path_name": None, "sampling_session_seq_id": 0}
        read(await shop.train(model, K.SAVE_WEIGHTS_FOR_SAMPLER, 2, **body))
    await trainer.create_model("stranger", trainer.models[model].settings)
    await engine.open_sampler("stranger", SamplerWeights("s"))
    trainer.calls.clear()
    async with a_shop(tmp_path, LIMITS, trainer, engine, session=shop.session) as again:
        await again.desk.heartbeat("ann", shop.session)
        read(await again.train(model, K.OPTIM_STEP, 3))
        # The trainer still held the model.
        await until(lambda: "stranger" not in trainer.models)
        calls = [call for name, call in trainer.calls if name == model]
        assert calls == ["update 2"]
        sampler = await again.desk.describe_sampler("ann", f"{shop.session}:sample:0")
        read(await again.order(sample_order(sampler.sampler_id, 0, [5])))
        assert "stranger" not in engine.samplers


async def test_after_a_restart_no_order_waits_for_one_that_was_refused(tmp_path: Path) -> None:
    trainer = ScriptedTrainer()
    async with a_shop(tmp_path, LIMITS, trainer) as shop:
        model = await shop.model()
        for seq in (2, 4, 1):
            await shop.desk.pass_over("ann", model, seq)
        # Number 4 is given again, and is accepted before its turn.
        late = [an_order(K.OPTIM_STEP, shop.session, model, seq) for seq in (4, 3)]
        accepted = await shop.desk.submit(late[0])
    async with a_shop(tmp_path, LIMITS, trainer, session=shop.session) as again:
        assert isinstance(await again.desk.wait("ann", accepted.request_id, 0.1), Pending)
        read(await again.order(late[1]))
        read(await again.result_of(accepted.request_id))
        read(await again.train(model, K.OPTIM_STEP, 5))


async def test_an_answer_that_was_lost_on_the_way_is_asked_for_again(tmp_path: Path) -> None:
    trainer = ScriptedTrainer()
    async with a_shop(tmp_path, LIMITS, trainer) as shop:
        model = await shop.model()
        trainer.losing_answers = 2
        first = read(await shop.train(model, K.FORWARD_BACKWARD, 1, tokens=[1]))
        read(await shop.train(model, K.OPTIM_STEP, 2))
        assert trainer.models[model].newest == 2
        assert [call for _, call in trainer.calls].count("backward 1") == 3
        assert first


async def test_a_trainer_that_is_ahead_begins_anew(tmp_path: Path) -> None:
    async with a_shop(tmp_path, LIMITS) as shop:
        model = await shop.model()
        read(await shop.train(model, K.FORWARD_BACKWARD, 1, tokens=[1]))
        shop.trainer.models[model].newest = 9
        shop.trainer.calls.clear()
        read(await shop.train(model, K.OPTIM_STEP, 2))
        calls = [call for _, call in shop.trainer.calls]
        assert calls == ["update 2", "delete", "create", "backward 1", "update 2"]


async def test_a_folder_that_was_moved_has_all_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with a_shop(Path("here"), LIMITS) as shop:
        model = await shop.model()
        for seq in range(1, 7):
            read(await shop.train(model, K.OPTIM_STEP, seq))
        path = read(await shop.train(model, K.SAVE_WEIGHTS, 7, path_name="a"))["path"]
        body: dict[str, Any] = {"path_name": None, "sampling_session_seq_id": 0}
        read(await shop.train(model, K.SAVE_WEIGHTS_FOR_SAMPLER, 8, **body))
        sampler = f"{shop.session}:sample:0"
        expected = read(await shop.order(sample_order(sampler, 0, [5])))
    tmp_path.joinpath("here").rename(tmp_path / "there")
    async with a_shop(Path("there"), LIMITS, session=shop.session) as again:
        assert read(await again.order(sample_order(sampler, 1, [5]))) == expected
        load: dict[str, Any] = {"path": path, "with_optimizer": True}
        read(await again.train(model, K.LOAD_WEIGHTS, 9, **load))
        assert "load 1" in [call for _, call in again.trainer.calls]
