"""A run keeps the commit that the hub had for its model at its start, in its files and in
resumes."""

import json
from pathlib import Path
from typing import Any

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_launcher.control.spec_changes import diff_specs, kept_commit
from flotilla_launcher.ports import LauncherHooks
from flotilla_launcher.run_spec import RunSpec
from tests.support.launcher import serving, spec
from tests.support.model_hub import FIRST, SECOND


def of_model(revision: str | None, model: str = "org/model", **sections: Any) -> dict[str, Any]:
    policy = {"model": model, "max_model_len": 8, "dtype": "float32"}
    return spec(policy={**policy, **({"revision": revision} if revision else {})}, **sections)


class Hub:
    """A hub whose branch moves with each query."""

    def __init__(self) -> None:
        self.commits = iter((FIRST, SECOND))
        self.queries: list[str | None] = []

    async def pin(self, plan: RunSpec) -> str | None:
        revision = plan.tables["policy"].get("revision")
        if revision in (FIRST, SECOND):
            return None
        self.queries.append(revision)
        return next(self.commits)


async def test_a_run_and_its_resumes_keep_the_commit_that_a_branch_had(tmp_path: Path) -> None:
    hub = Hub()
    async with serving(tmp_path, hooks=LauncherHooks(pin=hub.pin)) as served:
        run = await served.ended(await served.start(of_model("main", learner={"steps": 1})))
        assert run.outcome == pb.OUTCOME_COMPLETED, run.error
        kept = json.loads((tmp_path / run.run_id / "spec.json").read_text())["policy"]
        assert kept["revision"] == FIRST
        events = served.launcher.store.list_events(run.run_id, 0)
        reported = [event.body["text"] for event in events if event.kind == "message"]
        output = f"org/model: revision main is commit {FIRST}, pinned for this run and its resumes"
        assert output in reported
        for revision in (None, "main", FIRST):
            again = of_model(revision, learner={"steps": 2 + len(hub.queries)})
            await served.start(again, resume_run_id=run.run_id)
            await served.ended(run.run_id)
            kept = json.loads((tmp_path / run.run_id / "spec.json").read_text())["policy"]
            assert kept["revision"] == FIRST
        assert hub.queries == ["main"]


async def test_a_run_that_has_begun_takes_no_other_commit() -> None:
    stored = of_model(FIRST)
    assert [change.key for change in diff_specs(stored, of_model(SECOND))] == ["policy.revision"]
    assert diff_specs(stored, of_model(None)) == diff_specs(stored, of_model("main")) == []
    assert kept_commit(stored, of_model("main")) == FIRST
    assert kept_commit(of_model("main"), of_model(None)) is None
    assert kept_commit(stored, of_model(None, model="org/other")) is None
