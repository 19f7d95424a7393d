"""A run on rented machines that would keep nothing is not begun by mistake."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flotilla_common.spec.config import canonical_json
from flotilla_common.spec.spec_loading import apply_override
from flotilla_launcher.doctor import checkpoint_store as probe
from flotilla_launcher.doctor.findings import Finding, Status, ok
from flotilla_launcher.doctor.start_gate import doctor_gate
from flotilla_launcher.ports import PendingRun, RunRefusedError
from flotilla_launcher.run_spec import parse_spec
from flotilla_launcher.state import Run, RunMode
from tests.support.doctor import check, forged_services, probed, spec, subject

RENTED = ("launcher.backend=sky", 'launcher.sky.learner.ordered=[{infra = "lambda"}]')
SLURM = ("launcher.backend=sky", 'launcher.sky.learner.ordered=[{infra = "slurm/box"}]')


async def test_a_run_whose_model_would_go_with_its_machine_is_refused_with_the_key_and_the_way_out(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    result = await probed("store", subject(spec(policy, tasks, *RENTED), tmp_path))
    check(result, Status.FAIL, "learner.checkpoint.remote", "model and all checkpoints go")
    check(result, Status.FAIL, 'launcher.skip_probes = ["store"]', "--skip store")
    left_out = spec(policy, tasks, *RENTED, 'launcher.skip_probes=["store"]')
    check(await probed("store", subject(left_out, tmp_path)), Status.SKIPPED, "skip_probes")


async def test_a_store_that_is_set_is_tried_instead(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    url = f"learner.checkpoint.remote=file://{tmp_path}/kept"
    about = replace(
        subject(spec(policy, tasks, *RENTED, url), tmp_path),
        python=subject(spec(policy, tasks), tmp_path).python,
    )
    check(await probed("store", about), Status.OK, "wrote, read back and removed")


async def test_a_bucket_whose_keys_machines_do_not_get_is_named(
    policy: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(*_: object) -> list[Finding]:
        return [ok("wrote, read back and removed an object")]

    monkeypatch.setattr(probe, "run_probe_module", answer)
    bucket = "learner.checkpoint.remote=s3://bucket/prefix"
    content = spec(policy, tasks, *RENTED, bucket, f"launcher.sky.python={sys.executable}")
    nothing = {"AWS_ACCESS_KEY_ID": "", "FLOTILLA_REMOTE_OPTIONS": ""}
    result = await probed("store", subject(content, tmp_path, **nothing))
    check(result, Status.WARN, "machines are handed no key", "export AWS_ACCESS_KEY_ID")
    for name in nothing:
        about = subject(content, tmp_path, **{**nothing, name: "a-value"})
        check(await probed("store", about), Status.OK)


@pytest.mark.parametrize(
    ("machines", "status"),
    [
        ('[{infra = "slurm"}]', Status.WARN),
        ('[{infra = "slurm/box/gpu"}, {infra = "slurm/other"}]', Status.WARN),
        ('[{infra = "slurm/box"}, {infra = "aws"}]', Status.FAIL),
        ('[{accelerators = "H100:1"}]', Status.FAIL),
    ],
)
async def test_slurm_alone_is_only_warned_of(
    policy: Path, tasks: Path, tmp_path: Path, machines: str, status: Status
) -> None:
    content = spec(policy, tasks, RENTED[0], f"launcher.sky.learner.any_of={machines}")
    check(await probed("store", subject(content, tmp_path)), status, "all checkpoints")


async def test_of_several_clouds_the_one_that_the_spec_names_counts(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    both = 'launcher.sky.learner.any_of=[{infra = "slurm/box"}, {infra = "aws"}]'
    content = spec(policy, tasks, RENTED[0], both, "launcher.sky.cloud=slurm")
    check(await probed("store", subject(content, tmp_path)), Status.WARN, "Slurm job")


@pytest.mark.parametrize("overrides", [(), (*RENTED, "learner.mode=eval")])
async def test_what_stays_here_or_trains_nothing_needs_no_store(
    policy: Path, tasks: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    about = subject(spec(policy, tasks, *overrides), tmp_path)
    check(await probed("store", about), Status.SKIPPED, "nothing is uploaded")


async def test_the_gate_refuses_training_and_lets_an_evaluation_begin(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    content = spec(policy, tasks, *SLURM)
    apply_override(content, RENTED[1])
    costly = [
        "clouds",
        "ports",
        "tokenizer",
        "dialect",
        "episodes",
        "versions",
        "memory",
        "disk",
    ]
    content["launcher"]["skip_probes"] = costly
    plan = parse_spec(canonical_json(content))
    run = Run(run_id="well-1", name="well", wanted=plan.config.replica_counts())
    intent = PendingRun(run, tmp_path / "runs" / "well-1", plan)
    with forged_services():
        with pytest.raises(RunRefusedError, match=r"store: learner\.checkpoint\.remote is not set"):
            await doctor_gate(intent)
        await doctor_gate(replace(intent, run=replace(run, mode=RunMode.EVAL_ONLY)))
