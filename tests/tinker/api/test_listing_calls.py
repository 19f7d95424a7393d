from pathlib import Path

import pytest

from tests.support.fake_desk import MODEL, MODEL_ID
from tests.tinker.api.conftest import ServedDesk

pytestmark = pytest.mark.asyncio(loop_scope="module")

RUN = f"/training_runs/{MODEL_ID}"
TIME = "2023-11-14T22:13:20+00:00"
CHECKPOINT = {
    "checkpoint_id": "weights/a",
    "checkpoint_type": "training",
    "time": TIME,
    "tinker_path": f"tinker://{MODEL_ID}/weights/a",
    "size_bytes": 10,
    "public": False,
    "expires_at": None,
}


async def test_a_training_run_is_shown_with_its_newest_checkpoints(served: ServedDesk) -> None:
    run = (await served.get(RUN, access_scope="owned")).json()

    assert (run["training_run_id"], run["base_model"]) == (MODEL_ID, MODEL)
    assert (run["model_owner"], run["is_lora"], run["lora_rank"]) == ("alice", True, 8)
    assert (run["last_request_time"], run["last_checkpoint"]) == (TIME, CHECKPOINT)
    assert run["last_sampler_checkpoint"]["checkpoint_id"] == "sampler_weights/b"
    assert (await served.get("/training_runs/s1:train:9")).status_code == 404


async def test_lists_are_cut_into_pages(served: ServedDesk) -> None:
    runs = (await served.get("/training_runs", limit=1, offset=0, access_scope="owned")).json()
    saved = (await served.get("/checkpoints", limit=1, offset=1)).json()
    of_run = (await served.get(f"{RUN}/checkpoints")).json()

    assert [run["training_run_id"] for run in runs["training_runs"]] == [MODEL_ID]
    assert runs["cursor"] == {"offset": 0, "limit": 1, "total_count": 1}
    assert [each["checkpoint_id"] for each in saved["checkpoints"]] == ["sampler_weights/b"]
    assert saved["cursor"] == {"offset": 1, "limit": 1, "total_count": 2}
    assert of_run["checkpoints"][0] == CHECKPOINT
    assert (await served.get("/checkpoints", limit="all")).status_code == 400


async def test_weights_are_described_by_their_model(served: ServedDesk) -> None:
    answer = await served.post("/weights_info", tinker_path=f"tinker://{MODEL_ID}/weights/a")

    assert answer.json() == {
        "base_model": MODEL,
        "optimizer_config": {"type": "adamw"},
        "is_lora": True,
        "lora_rank": 8,
        "train_unembed": False,
        "train_mlp": True,
        "train_attn": True,
    }


async def test_a_checkpoint_is_deleted_or_expires(served: ServedDesk) -> None:
    place = f"/api/v1{RUN}/checkpoints/weights/a"
    deleted = await served.http.delete(place)
    kept = await served.http.put(f"{place}/ttl", json={"ttl_seconds": None})
    expires = await served.http.put(f"{place}/ttl", json={"ttl_seconds": 3600})

    assert {deleted.status_code, kept.status_code, expires.status_code} == {200}
    path = f"tinker://{MODEL_ID}/weights/a"
    assert served.desk.deleted == [path]
    assert served.desk.ttls == [(path, None), (path, 3600)]
    assert (await served.http.delete(f"{place}z")).status_code == 404
    assert (await served.http.delete(f"/api/v1{RUN}/checkpoints/other/a")).status_code == 400


async def test_a_checkpoint_is_sent_as_one_file(served: ServedDesk, tmp_path: Path) -> None:
    served.desk.archive_file = tmp_path / "a.tar"
    served.desk.archive_file.write_bytes(b"tar" * 100_000)
    answer = await served.get(f"{RUN}/checkpoints/weights/a/archive")

    assert answer.content == b"tar" * 100_000
    assert answer.headers["content-type"] == "application/x-tar"


@pytest.mark.parametrize("method", ["POST", "DELETE"])
async def test_nothing_is_published(served: ServedDesk, method: str) -> None:
    answer = await served.http.request(method, f"/api/v1{RUN}/checkpoints/weights/a/publish")

    assert answer.status_code == 403
    assert "are not published" in answer.json()["detail"]
