"""Checkpoints: their names, lives, sizes and archives."""

import asyncio
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flotilla_tinker.types import Failure, Kind
from flotilla_tinker.work.desk_errors import BadOrder, GoneError, NotFound, TooMuch
from flotilla_tinker.work.limits import Limits
from tests.tinker.work.desk_doubles import an_order, sample_order
from tests.tinker.work.shop import Shop, a_shop, read

K = Kind


async def save(shop: Shop, model: str, seq: int, name: str, **more: Any) -> str:
    return read(await shop.train(model, K.SAVE_WEIGHTS, seq, path_name=name, **more))["path"]


async def test_checkpoints_are_listed_described_and_deleted(tmp_path: Path) -> None:
    async with a_shop(tmp_path) as shop:
        model, other = await shop.model(0), await shop.model(1)
        first = await save(shop, model, 1, "a")
        read(await shop.train(model, K.SAVE_WEIGHTS_FOR_SAMPLER, 2, path_name="a"))
        await save(shop, other, 1, "a")
        listed = await shop.desk.list_checkpoints("ann", model)
        assert [(each.path, each.kind) for each in listed] == [
            (f"tinker://{model}/weights/a", "training"),
            (f"tinker://{model}/sampler_weights/a", "sampler"),
        ]
        assert len(await shop.desk.list_checkpoints("ann", None)) == 3
        described = await shop.desk.describe_checkpoint("ann", first)
        assert (described.size_bytes > 0, described.settings.lora_rank) == (True, 8)
        await shop.desk.delete_checkpoint("ann", first)
        with pytest.raises(NotFound, match="it may have expired or been deleted"):
            await shop.desk.describe_checkpoint("ann", first)
        gone = await shop.train(model, K.LOAD_WEIGHTS, 3, path=first, with_optimizer=True)
        assert isinstance(gone, Failure)
        assert "there is no checkpoint" in gone.message


async def test_a_name_is_taken_once_unless_it_is_to_be_overwritten(tmp_path: Path) -> None:
    async with a_shop(tmp_path) as shop:
        model = await shop.model()
        await save(shop, model, 1, "a")
        taken = await shop.train(model, K.SAVE_WEIGHTS, 2, path_name="a")
        assert isinstance(taken, Failure)
        assert "exists: choose another name, or delete it first" in taken.message
        await save(shop, model, 3, "a", overwrite=True)
        await shop.until_folders(1)


@pytest.mark.parametrize("name", ["..", "a/b", "", "a" * 201, "ä", "a\n", "../../etc/passwd"])
async def test_a_name_cannot_leave_its_place(tmp_path: Path, name: str) -> None:
    async with a_shop(tmp_path) as shop:
        model = await shop.model()
        with pytest.raises(BadOrder, match="a checkpoint cannot be called"):
            await shop.train(model, K.SAVE_WEIGHTS, 1, path_name=name)
        # Its number is free for a better one.
        await save(shop, model, 1, "better")


async def test_a_checkpoint_expires_when_it_was_to(tmp_path: Path) -> None:
    async with a_shop(tmp_path) as shop:
        model = await shop.model()
        short = await save(shop, model, 1, "short", ttl_s=50)
        kept = await save(shop, model, 2, "kept", ttl_s=50)
        await shop.desk.set_ttl("ann", kept, None)
        shop.clock.now += 60
        with pytest.raises(NotFound):
            await shop.desk.describe_checkpoint("ann", short)
        assert (await shop.desk.describe_checkpoint("ann", kept)).expires_s is None
        await shop.until_folders(1)


async def test_a_checkpoint_that_is_deleted_while_it_gets_a_life_stays_deleted(
    tmp_path: Path,
) -> None:
    async with a_shop(tmp_path) as shop:
        model = await shop.model()
        path = await save(shop, model, 1, "a")
        desk = shop.desk
        await asyncio.gather(desk.delete_checkpoint("ann", path), desk.set_ttl("ann", path, 50))
        assert not await desk.list_checkpoints("ann", None)
    async with a_shop(tmp_path, session=shop.session) as again:
        assert not await again.desk.list_checkpoints("ann", None)


async def test_what_a_client_keeps_is_bounded(tmp_path: Path) -> None:
    async with a_shop(tmp_path, Limits(most_disk_bytes=100, free_disk_bytes=0)) as shop:
        model = await shop.model()
        first = await save(shop, model, 1, "a")
        await save(shop, model, 2, "b")
        await save(shop, model, 3, "c")
        full = await shop.train(model, K.SAVE_WEIGHTS, 4, path_name="d")
        assert isinstance(full, Failure)
        assert "of 100 bytes: delete checkpoints" in full.message
        await shop.desk.delete_checkpoint("ann", first)
        await save(shop, model, 5, "d")


async def test_samplers_that_nobody_uses_make_room(tmp_path: Path) -> None:
    limits = Limits(most_disk_bytes=100, free_disk_bytes=0, unused_s=50.0)
    async with a_shop(tmp_path, limits) as shop:
        model = await shop.model()
        for number in range(8):
            body: dict[str, Any] = {"path_name": None, "sampling_session_seq_id": number}
            read(await shop.train(model, K.SAVE_WEIGHTS_FOR_SAMPLER, number + 1, **body))
            read(await shop.order(sample_order(f"{shop.session}:sample:0", number, [1])))
            shop.clock.now += 30
        assert len(list((tmp_path / "weights").iterdir())) <= 4
        with pytest.raises(GoneError, match="made room when nobody used them"):
            await shop.desk.submit(sample_order(f"{shop.session}:sample:1", 0, [1]))


async def test_an_archive_holds_the_checkpoints_files(tmp_path: Path) -> None:
    async with a_shop(tmp_path, Limits(most_archive_bytes=25_000, free_disk_bytes=0)) as shop:
        model = await shop.model()
        paths = [await save(shop, model, seq, f"w{seq}") for seq in range(1, 5)]
        archives = [await shop.desk.archive("ann", path) for path in paths]
        assert archives[-1] == await shop.desk.archive("ann", paths[-1])
        with tarfile.open(archives[-1]) as archive:
            assert "./state.json" in archive.getnames()
        left = list((tmp_path / "archives").iterdir())
        assert sum(each.stat().st_size for each in left) <= 35_000
        await shop.desk.delete_checkpoint("ann", paths[-1])
        assert not archives[-1].exists()


async def test_sampling_names_the_path_that_it_needs(tmp_path: Path) -> None:
    async with a_shop(tmp_path) as shop:
        model = await shop.model()
        path = await save(shop, model, 1, "a")
        with pytest.raises(NotFound, match="use a path that save_weights_for_sampler gave"):
            await shop.desk.open_sampling_session(
                "ann", shop.session, 0, base_model=None, model_path=path
            )
        with pytest.raises(BadOrder, match="samples from 'tiny', not 'other'"):
            await shop.desk.open_sampling_session(
                "ann", shop.session, 0, base_model="other", model_path=None
            )


async def test_weights_that_nothing_names_are_removed_at_a_start(tmp_path: Path) -> None:
    async with a_shop(tmp_path) as shop:
        model = await shop.model()
        path = await save(shop, model, 1, "a")
    (tmp_path / "weights" / "half-written").mkdir()
    async with a_shop(tmp_path) as shop:
        assert len(list((tmp_path / "weights").iterdir())) == 1
        session = await shop.desk.open_session("ann", {})
        resumed = f"{session}:train:0"
        order = an_order(K.LOAD_WEIGHTS, session, resumed, 0, path=path, with_optimizer=False)
        read(await shop.order(order))


async def test_a_disk_that_is_nearly_full_takes_no_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_shop(tmp_path, Limits(free_disk_bytes=1000)) as shop:
        model = await shop.model()
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=999))
        await asyncio.sleep(0.2)  # the desk looks
        with pytest.raises(TooMuch, match="has 999 bytes free, and keeps 1000"):
            await shop.train(model, K.OPTIM_STEP, 1)
