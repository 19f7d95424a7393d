"""Sessions of clients: their ends, and what stays."""

from pathlib import Path
from typing import Any

import pytest

from flotilla_tinker.types import Failure, Kind
from flotilla_tinker.work.desk_errors import (
    GoneError,
    NotFound,
    TooMuch,
)
from flotilla_tinker.work.limits import Limits
from tests.support.waiting import until
from tests.tinker.work.desk_doubles import (
    BASE,
    an_order,
    create_order,
    sample_order,
)
from tests.tinker.work.shop import a_shop, read

K = Kind


async def test_a_session_without_heartbeats_ends_and_its_checkpoints_stay(tmp_path: Path) -> None:
    limits = Limits(stale_s=50.0, free_disk_bytes=0)
    async with a_shop(tmp_path, limits) as shop:
        model = await shop.model()
        saved = read(await shop.train(model, K.SAVE_WEIGHTS, 1, path_name="a"))["path"]
        body: dict[str, Any] = {"path_name": None, "sampling_session_seq_id": 0}
        read(await shop.train(model, K.SAVE_WEIGHTS_FOR_SAMPLER, 2, **body))
        sampler = f"{shop.session}:sample:0"
        read(await shop.order(sample_order(sampler, 0, [5])))
        waiting = await shop.desk.submit(an_order(K.OPTIM_STEP, shop.session, model, 9))
        shop.clock.now += 60
        ended = await shop.result_of(waiting.request_id)
        assert isinstance(ended, Failure)
        assert "no heartbeat came for 50 s" in ended.message
        with pytest.raises(GoneError):
            await shop.desk.heartbeat("ann", shop.session)
        await until(lambda: not shop.trainer.models and not shop.engine.samplers)
        await shop.until_folders(1)
        another = await shop.desk.open_session("ann", {})
        resumed = an_order(
            K.LOAD_WEIGHTS, another, f"{another}:train:0", 0, path=saved, with_optimizer=True
        )
        read(await shop.order(resumed))
        read(await shop.order(an_order(K.OPTIM_STEP, another, f"{another}:train:0", 1)))
        assert (await shop.desk.describe_model("ann", f"{another}:train:0")).updates == 2


async def test_one_client_sees_nothing_of_another(tmp_path: Path) -> None:
    async with a_shop(tmp_path) as shop:
        model = await shop.model()
        saved = read(await shop.train(model, K.SAVE_WEIGHTS, 1, path_name="a"))["path"]
        accepted = await shop.desk.submit(an_order(K.OPTIM_STEP, shop.session, model, 2))
        desk, bob = shop.desk, "bob"
        session = await desk.open_session(bob, {})
        for stolen in (
            desk.heartbeat(bob, shop.session),
            desk.wait(bob, accepted.request_id, 0),
            desk.describe_model(bob, model),
            desk.describe_checkpoint(bob, saved),
            desk.delete_checkpoint(bob, saved),
            desk.submit(an_order(K.OPTIM_STEP, session, model, 3, bob)),
        ):
            with pytest.raises(NotFound):
                await stolen
        assert not await desk.list_checkpoints(bob, None)


async def test_clients_that_were_killed_make_room_for_new_models(tmp_path: Path) -> None:
    limits = Limits(most_models=2, silent_s=50.0, free_disk_bytes=0)
    async with a_shop(tmp_path, limits) as shop:
        silent = await shop.model(0)
        read(await shop.train(silent, K.FORWARD_BACKWARD, 1, tokens=[1]))
        read(await shop.train(silent, K.OPTIM_STEP, 2))
        shop.clock.now += 60
        shop.session = await shop.desk.open_session("ann", {})
        await shop.model(0)
        await shop.model(1)
        kept = await shop.desk.list_checkpoints("ann", None)
        assert [each.path for each in kept] == [f"tinker://{silent}/weights/last"]
        with pytest.raises(TooMuch, match="2 of them yours"):
            await shop.model(2)


async def test_a_client_that_fell_silent_continues_from_the_last_state(tmp_path: Path) -> None:
    limits = Limits(stale_s=50.0, last_state_s=1000.0, free_disk_bytes=0)
    async with a_shop(tmp_path, limits) as shop:
        model, started = await shop.model(0), await shop.model(1)
        for seq in (1, 3):
            read(await shop.train(model, K.FORWARD_BACKWARD, seq, tokens=[seq]))
            read(await shop.train(model, K.OPTIM_STEP, seq + 1))
        read(await shop.train(started, K.FORWARD_BACKWARD, 1, tokens=[1]))
        expected = await shop.train(model, K.FORWARD, 5, tokens=[9], forward_only=True)
        shop.clock.now += 60
        await until(lambda: not shop.trainer.models)
        kept = await shop.desk.list_checkpoints("ann", None)
        assert [each.path for each in kept] == [f"tinker://{model}/weights/last"]
        assert kept[0].expires_s == shop.clock.now + 1000
        await shop.until_folders(1)
        session = shop.session = await shop.desk.open_session("ann", {})
        resumed = f"{session}:train:0"
        body: dict[str, Any] = {"path": kept[0].path, "with_optimizer": True}
        read(await shop.order(an_order(K.LOAD_WEIGHTS, session, resumed, 0, **body)))
        found = await shop.train(resumed, K.FORWARD, 1, tokens=[9], forward_only=True)
        assert read(found) == read(expected)


@pytest.mark.parametrize("unload", [True, False])
async def test_nothing_is_kept_of_the_orders_of_a_model_that_has_ended(
    tmp_path: Path, *, unload: bool
) -> None:
    async with a_shop(tmp_path) as shop:
        model = await shop.model()
        read(await shop.train(model, K.FORWARD_BACKWARD, 1, tokens=[1]))
        read(await shop.train(model, K.OPTIM_STEP, 2))
        if unload:
            read(await shop.train(model, K.UNLOAD_MODEL, 0))
        else:
            await shop.desk.finish_session("ann", shop.session)
        count = "SELECT count(*) FROM bodies"
        assert await shop.desk.store.run(lambda db: db.execute(count).fetchone()[0]) == 0


async def test_a_finished_session_takes_no_orders(tmp_path: Path) -> None:
    async with a_shop(tmp_path) as shop:
        model = await shop.model()
        for _ in range(2):
            await shop.desk.finish_session("ann", shop.session)
        for order in (
            an_order(K.OPTIM_STEP, shop.session, model, 1),
            sample_order(BASE, 0, [5], shop.session),
            create_order(shop.session, 1),
        ):
            with pytest.raises(GoneError, match=r"the session .* has ended"):
                await shop.desk.submit(order)
        await until(lambda: not shop.trainer.models)
        assert not await shop.desk.list_checkpoints("ann", None)
