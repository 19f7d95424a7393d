"""A machine is lost with its disk: the run resumes elsewhere, from what was uploaded to S3."""

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from flotilla_learner.checkpoints.adapters.fsspec_store import open_store
from flotilla_learner.checkpoints.remote_layout import stamps
from flotilla_learner.ports import RemoteStore
from tests.faults.harness import GATEWAY, LEARNER, RANK, ROLLOUT, FaultRun
from tests.support.remote_checkpoints import BUCKET, s3_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


async def test_a_run_resumes_from_s3_when_its_machine_is_gone(
    new_run: Callable[..., FaultRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "an-id-for-tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-for-tests")
    with s3_server() as endpoint:
        options = {"endpoint_url": endpoint}
        url = f"s3://{BUCKET}/lost"
        checkpoint = {"every": 2, "remote": url, "remote_options": options}
        run = new_run(learner={"steps": 1000, "checkpoint": checkpoint})
        await run.train()
        await run.step(1)
        store = open_store(f"{url}/{run.folder.name}", options)
        await first_manifest(store, run)
        # The command goes first: it would start another launcher.
        run.kill_command()
        run.kill_launcher()
        run.kill(LEARNER, RANK, ROLLOUT, GATEWAY)
        await run.exit()
        run_id = run.folder.name
        run.clear_shared_memory()
        await run.gone(30.0)
        shutil.rmtree(run.runs)
        steps = stamps(store.list_files("manifests"))[-1].step + 2
        await run.train("--resume", store.url, f"--learner.steps={steps}")
        await run.completes()
        assert f"Restored run {run_id} at step" in run.output
        await run.check_end(steps)
        assert run.folder.name == run_id
        assert [stamp.run_epoch for stamp in stamps(store.list_files("manifests"))][-1] == 2
    load(run.folder / "model")


async def first_manifest(store: RemoteStore, run: FaultRun) -> None:
    deadline = time.monotonic() + run.limit_s
    while time.monotonic() < deadline:
        if await asyncio.to_thread(store.list_files, "manifests"):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"nothing was uploaded:\n{run.state()}")


def load(folder: Path) -> None:
    """Load it as any user would."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("hello", return_tensors="pt")
    assert model(**ids).logits.isfinite().all()
