"""The desk from order to answer, with peers that compute next to nothing."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from flotilla_tinker.types import Category, Failure, Kind, Pending
from flotilla_tinker.work.desk_errors import (
    Away,
    BadOrder,
    Conflict,
    GoneError,
    TooLarge,
    TooMuch,
)
from flotilla_tinker.work.limits import Limits
from tests.support.waiting import until
from tests.tinker.work.desk_doubles import (
    BASE,
    DEADLY,
    REFUSED,
    ScriptedEngine,
    ScriptedTrainer,
    an_order,
    sample_order,
    with_body,
)
from tests.tinker.work.shop import a_shop, read

K = Kind


async def test_orders_of_every_kind_are_carried_out(tmp_path: Path) -> None:
    async with a_shop(tmp_path) as shop:
        model = await shop.model()
        first = read(await shop.train(model, K.FORWARD_BACKWARD, 1, tokens=[1, 2]))
        assert (
            read(await shop.train(model, K.FORWARD, 2, tokens=[1, 2], forward_only=True)) == first
        )
        read(await shop.train(model, K.OPTIM_STEP, 3, learning_rate=1e-3))
        saved = read(await shop.train(model, K.SAVE_WEIGHTS, 4, path_name="a"))
        assert saved["path"] == f"tinker://{model}/weights/a"
        trained = read(await shop.train(model, K.FORWARD, 5, tokens=[1, 2], forward_only=True))
        assert trained != first
        read(await shop.train(model, K.OPTIM_STEP, 6))
        loaded = await shop.train(model, K.LOAD_WEIGHTS, 7, path=saved["path"], with_optimizer=True)
        assert read(loaded)["type"] == "load_weights"
        again = await shop.train(model, K.FORWARD, 8, tokens=[1, 2], forward_only=True)
        assert read(again) == trained
        read(await shop.train(model, K.UNLOAD_MODEL, 0))
        assert not shop.trainer.models
        with pytest.raises(GoneError, match="was unloaded"):
            await shop.train(model, K.FORWARD, 9, tokens=[1])


async def test_orders_go_on_after_one_that_was_refused(tmp_path: Path) -> None:
    async with a_shop(tmp_path) as shop:
        model = await shop.model()
        await shop.desk.pass_over("bob", model, 1)
        waiting = await shop.desk.submit(an_order(K.OPTIM_STEP, shop.session, model, 3))
        assert isinstance(await shop.desk.wait("ann", waiting.request_id, 0.2), Pending)
        for seq in (2, 1):
            await shop.desk.pass_over("ann", model, seq)
        read(await shop.result_of(waiting.request_id))
        read(await shop.train(model, K.OPTIM_STEP, 4))


async def test_orders_are_carried_out_in_order_however_they_arrive(tmp_path: Path) -> None:
    async with a_shop(tmp_path) as shop:
        model = await shop.model()
        orders = [
            an_order(K.FORWARD_BACKWARD, shop.session, model, seq, tokens=[seq])
            for seq in (3, 1, 5, 2, 4)
        ]
        await asyncio.gather(*(shop.order(order) for order in orders))
        calls = [call for _, call in shop.trainer.calls if call.startswith("backward")]
        assert calls == [f"backward {number}" for number in (1, 2, 3, 4, 5)]


async def test_a_repeated_order_is_the_same_future_and_another_body_a_conflict(
    tmp_path: Path,
) -> None:
    async with a_shop(tmp_path) as shop:
        model = await shop.model()
        order = an_order(K.FORWARD_BACKWARD, shop.session, model, 1, tokens=[1])
        first, second = await asyncio.gather(shop.desk.submit(order), shop.desk.submit(order))
        assert first == second
        await shop.result_of(first.request_id)
        assert await shop.desk.submit(order) == first
        with pytest.raises(Conflict, match=r"order 1 of .* was a forward_backward with another"):
            await shop.desk.submit(with_body(order, b'{"tokens": [2]}'))
        assert [call for _, call in shop.trainer.calls].count("backward 1") == 1


async def test_samples_come_from_the_weights_that_their_sampler_names(tmp_path: Path) -> None:
    async with a_shop(tmp_path) as shop:
        model = await shop.model()
        read(await shop.train(model, K.OPTIM_STEP, 1))
        named = read(await shop.train(model, K.SAVE_WEIGHTS_FOR_SAMPLER, 2, path_name="s"))
        assert named["path"] == f"tinker://{model}/sampler_weights/s"
        body: dict[str, Any] = {"path_name": None, "sampling_session_seq_id": 0}
        own = read(await shop.train(model, K.SAVE_WEIGHTS_FOR_SAMPLER, 3, **body))
        by_path = await shop.desk.open_sampling_session(
            "ann", shop.session, 1, base_model=None, model_path=named["path"]
        )
        base = await shop.desk.open_sampling_session(
            "ann", shop.session, 2, base_model=BASE, model_path=None
        )
        targets = [own["sampling_session_id"], by_path, base]
        answers = [read(await shop.order(sample_order(each, 0, [5]))) for each in targets]
        assert [answer[0]["spans"] for answer in answers] == [
            [[f"{model}@1", 3]],
            [[f"{model}@1", 3]],
            [[BASE, 3]],
        ]
        assert answers[0][0]["tokens"] == answers[1][0]["tokens"] != answers[2][0]["tokens"]
        described = await shop.desk.describe_sampler("ann", by_path)
        assert (described.base_model, described.model_path) == (BASE, named["path"])


async def test_samplers_in_flight_follow_their_model(tmp_path: Path) -> None:
    async with a_shop(tmp_path) as shop:
        model = await shop.model()
        samplers = list[str]()
        for number in range(2):
            body: dict[str, Any] = {"path_name": None, "sampling_session_seq_id": number}
            order = (model, K.SAVE_WEIGHTS_FOR_SAMPLER, 2 * number + 1)
            saved = read(await shop.train(*order, kind="inflight", **body))
            samplers.append(saved["sampling_session_id"])
            labels = [
                read(await shop.order(sample_order(each, number, [5])))[0]["spans"][0][0]
                for each in samplers
            ]
            assert labels == [f"{model}@{number}"] * (number + 1)
            read(await shop.train(model, K.OPTIM_STEP, 2 * number + 2))
        assert len(shop.engine.samplers) == 1
        # The folder of the first weights is gone.
        await shop.until_folders(1)


async def test_a_refusal_is_the_clients_failure_and_the_next_order_goes_on(tmp_path: Path) -> None:
    async with a_shop(tmp_path) as shop:
        model = await shop.model()
        refused = await shop.train(model, K.FORWARD_BACKWARD, 1, tokens=[REFUSED])
        assert refused == Failure("token -13 is out of luck", Category.USER)
        read(await shop.train(model, K.FORWARD_BACKWARD, 2, tokens=[1]))
        sampled = await shop.order(sample_order(BASE, 0, [REFUSED], shop.session))
        assert sampled == Failure("token -13 is out of luck", Category.USER)


async def test_a_lost_peer_is_waited_for(tmp_path: Path) -> None:
    async with a_shop(tmp_path) as shop:
        model = await shop.model()
        read(await shop.train(model, K.FORWARD_BACKWARD, 1, tokens=[1]))
        shop.trainer.lose_all()
        shop.trainer.away = shop.engine.away = True
        orders = [
            an_order(K.FORWARD_BACKWARD, shop.session, model, 2, tokens=[1]),
            sample_order(BASE, 0, [5], shop.session),
        ]
        for order in orders:
            accepted = await shop.desk.submit(order)
            pending = await shop.desk.wait("ann", accepted.request_id, 0.1)
            assert pending == Pending("paused_capacity")
        shop.trainer.away = shop.engine.away = False
        for order in orders:
            read(await shop.order(order))
        calls = [call for _, call in shop.trainer.calls]
        assert calls == ["create", "backward 1", "create", "backward 1", "backward 2"]


async def test_an_order_that_kills_its_peer_three_times_fails_and_others_go_on(
    tmp_path: Path,
) -> None:
    async with a_shop(tmp_path) as shop:
        model, other = await shop.model(0), await shop.model(1)
        before = read(await shop.train(other, K.FORWARD_BACKWARD, 1, tokens=[7]))
        orders = [
            an_order(K.FORWARD_BACKWARD, shop.session, model, 1, tokens=[DEADLY]),
            an_order(K.FORWARD_BACKWARD, shop.session, other, 2, tokens=[7]),
            sample_order(BASE, 0, [DEADLY], shop.session),
            *(sample_order(BASE, seq, [seq], shop.session) for seq in range(1, 6)),
        ]
        dead, lives, dead_sample, *samples = await asyncio.gather(*map(shop.order, orders))
        for failure in (dead, dead_sample):
            assert isinstance(failure, Failure)
            assert failure.category is Category.SERVER
            assert "died 3 times" in failure.message
        assert read(lives) == before
        assert all(read(sample) for sample in samples)
        read(await shop.train(model, K.FORWARD_BACKWARD, 2, tokens=[1]))


async def test_a_missing_number_is_waited_for_with_a_bound(tmp_path: Path) -> None:
    async with a_shop(tmp_path, Limits(gap_s=50.0, free_disk_bytes=0)) as shop:
        model = await shop.model()
        late = [an_order(K.OPTIM_STEP, shop.session, model, seq) for seq in (2, 4)]
        accepted = [await shop.desk.submit(order) for order in late]
        assert isinstance(await shop.desk.wait("ann", accepted[0].request_id, 0.3), Pending)
        shop.clock.now += 60
        for each in accepted:
            failure = await shop.result_of(each.request_id)
            assert failure == Failure("order 1 of this model has not come for 50 s", Category.USER)
        with pytest.raises(Conflict, match=r"order 1 of .* comes after 4"):
            await shop.train(model, K.OPTIM_STEP, 1)
        read(await shop.train(model, K.OPTIM_STEP, 5))


async def test_results_are_kept_for_a_while_after_their_delivery(tmp_path: Path) -> None:
    async with a_shop(tmp_path) as shop:
        order = sample_order(BASE, 0, [5], shop.session)
        accepted = await shop.desk.submit(order)
        first = await shop.result_of(accepted.request_id)
        assert await shop.result_of(accepted.request_id) == first
        await asyncio.sleep(0.3)  # the desk notes what was delivered
        shop.clock.now += 200
        await asyncio.sleep(0.3)
        assert await shop.result_of(accepted.request_id) == first
        shop.clock.now += 200
        await asyncio.sleep(0.3)
        with pytest.raises(GoneError, match="was kept long enough"):
            await shop.result_of(accepted.request_id)
        assert await shop.desk.submit(order) == accepted


async def test_models_that_cannot_be_held_are_refused(tmp_path: Path) -> None:
    limits = Limits(most_models=1, free_disk_bytes=0)
    async with a_shop(tmp_path, limits) as shop:
        with pytest.raises(BadOrder, match="this server trains 'tiny', not 'other'"):
            await shop.model(base_model="other")
        with pytest.raises(BadOrder, match="holds up to 64, the sampling engine up to 32"):
            await shop.model(lora_rank=33)
        await shop.model()
        with pytest.raises(TooMuch, match="1 models are trained here, 1 of them yours"):
            await shop.model(1)
        await shop.model()  # repeated


async def test_open_orders_are_bounded_for_each_client(tmp_path: Path) -> None:
    limits = Limits(most_orders=2, largest_order=1000, free_disk_bytes=0)
    engine = ScriptedEngine(gate=asyncio.Event())
    async with a_shop(tmp_path, limits, engine=engine) as shop:
        for seq in range(2):
            await shop.desk.submit(sample_order(BASE, seq, [5], shop.session))
        with pytest.raises(TooMuch, match=r"2 orders with .* bytes are open; there may be 2"):
            await shop.desk.submit(sample_order(BASE, 2, [5], shop.session))
        session = await shop.desk.open_session("bob", {})
        await shop.desk.submit(sample_order(BASE, 3, [5], session, "bob"))
        with pytest.raises(TooLarge, match="but may have 1000"):
            await shop.desk.submit(sample_order(BASE, 4, [5] * 900, session, "bob"))


async def test_a_cancelled_sample_ends(tmp_path: Path) -> None:
    engine = ScriptedEngine(gate=asyncio.Event(), max_num_seqs=1)
    async with a_shop(tmp_path, engine=engine) as shop:
        ids = [
            (await shop.desk.submit(sample_order(BASE, seq, [5], shop.session))).request_id
            for seq in range(3)
        ]
        await until(lambda: engine.running == 1)
        for request_id in (ids[1], ids[0]):
            await shop.desk.cancel("ann", request_id)
            failure = await shop.result_of(request_id)
            assert failure == Failure("the client has cancelled it", Category.USER)
        assert engine.gate
        engine.gate.set()
        read(await shop.result_of(ids[2]))
        assert len(engine.sampled) == 2


async def test_peers_that_never_came_up_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flotilla_tinker.work.desk._FACTS_S", 0.1)
    async with a_shop(tmp_path, trainer=ScriptedTrainer(away=True)) as shop:
        with pytest.raises(Away, match="the trainer is starting"):
            await shop.model()


async def test_an_engine_that_is_half_up_is_no_reason_to_fail_and_not_asked_all_the_time(
    tmp_path: Path,
) -> None:
    async with a_shop(tmp_path, engine=ScriptedEngine(half_up=True)) as shop:
        orders = [sample_order(BASE, seq, [5], shop.session) for seq in range(50)]
        accepted = [await shop.desk.submit(order) for order in orders]
        assert isinstance(await shop.desk.wait("ann", accepted[0].request_id, 1.5), Pending)
        assert shop.engine.described < 10
        shop.engine.half_up = False
        for each in accepted:
            read(await shop.result_of(each.request_id))


async def test_weights_for_samplers_need_a_place(tmp_path: Path) -> None:
    async with a_shop(tmp_path) as shop:
        model = await shop.model()
        with pytest.raises(BadOrder, match="give the weights a path"):
            await shop.train(model, K.SAVE_WEIGHTS_FOR_SAMPLER, 1, path_name=None)


async def test_a_model_that_could_not_be_created_leaves_nothing(tmp_path: Path) -> None:
    async with a_shop(tmp_path) as shop:
        first = await shop.model(0)
        path = read(await shop.train(first, K.SAVE_WEIGHTS, 1, path_name="a"))["path"]
        folder = next((tmp_path / "weights").iterdir())
        (folder / "state.json").unlink()
        second = f"{shop.session}:train:1"
        body: dict[str, Any] = {"path": path, "with_optimizer": True}
        failure = await shop.train(second, K.LOAD_WEIGHTS, 0, **body)
        assert isinstance(failure, Failure)
        assert failure.category is Category.SERVER
        assert "see the server's log" in failure.message
        assert set(shop.trainer.models) == {first}
        with pytest.raises(GoneError):
            await shop.train(second, K.OPTIM_STEP, 1)
