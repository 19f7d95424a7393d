"""The doctor's findings about requested machines: about those that the run would really get."""

import os
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.spec.spec_loading import apply_override
from flotilla_launcher.doctor.findings import Status
from flotilla_launcher.doctor.run_context import RunContext
from tests.launcher.doctor.test_memory import larger
from tests.support.doctor import check, double, probed, skypilot, spec, subject


def rented(policy: Path, tasks: Path, folder: Path, **sky: Any) -> RunContext:
    """8 billion parameters in bfloat16 on H200, at Lambda or at RunPod."""
    large = larger(policy, folder / "large", 8.2e9)
    content = spec(large, tasks, "policy.dtype=bfloat16", "launcher.backend=sky")
    content["learner"]["rank"] = {"device": "cuda"}
    content["rollout"]["engine"]["device"] = "cuda"
    kind = {"accelerators": "H200:1"}
    machines = {"any_of": [{"infra": "lambda", **kind}, {"infra": "runpod", **kind}]}
    services = dict.fromkeys(("learner", "env_gateway", "rollout"), machines)
    content["launcher"]["sky"] = {**services, **sky}
    return subject(content, folder)


async def test_only_candidates_at_the_one_cloud_that_the_spec_names_have_to_be_enabled(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    with double(lambda *_: (200, {})) as url:
        environ = skypilot(tmp_path, url)

        async def at(cloud: str | None) -> Any:
            about = rented(policy, tasks, tmp_path / (cloud or "any"), cloud=cloud)
            return await probed("clouds", subject(about.plan.tables, tmp_path, **environ))

        check(await at("runpod"), Status.FAIL, "learner: not enabled: runpod")
        check(await at("lambda"), Status.OK)
        check(await at(None), Status.WARN, "learner: not enabled: runpod")


async def test_sizes_are_those_of_the_one_cloud_that_the_spec_names(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    small = {"infra": "lambda", "accelerators": "H100:1", "disk_size": 100}
    large = {"infra": "runpod", "accelerators": "H200:1", "disk_size": 900}
    learner = {"ordered": [small, large]}
    anywhere = rented(policy, tasks, tmp_path / "any", learner=learner)
    there = rented(policy, tasks, tmp_path / "there", learner=learner, cloud="lambda")
    check(await probed("memory", anywhere), Status.WARN, "lambda H100:1 has 80.0 GiB")
    check(await probed("memory", there), Status.FAIL, "lambda H100:1 has 80.0 GiB")
    check(await probed("disk", anywhere), Status.WARN, "too much for the disk of lambda H100:1")
    check(await probed("disk", there), Status.FAIL, "too much for the disk of lambda H100:1")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "learner.rank.processes=4",
            "learner: lambda H200:2 has 2 GPUs for learner.rank",
        ),
        (
            "rollout.engine.tensor_parallel=8",
            "rollout: lambda H200:2 has 2 GPUs for rollout.engine.tensor_parallel = 8",
        ),
    ],
)
async def test_more_gpus_than_a_candidate_has_are_refused_by_the_key_that_requests_them(
    policy: Path, tasks: Path, tmp_path: Path, override: str, words: str
) -> None:
    two = {"any_of": [{"infra": "lambda", "accelerators": "H200:2"}]}
    about = rented(policy, tasks, tmp_path, learner=two, rollout=two)
    apply_override(wish := dict(about.plan.tables), override)
    key = override.partition("=")[0]
    check(await probed("memory", subject(wish, tmp_path)), Status.FAIL, words, f"lower {key}")
    apply_override(wish, f"{key}=2")
    check(await probed("memory", subject(wish, tmp_path)), Status.OK)


async def test_ranks_are_counted_for_each_of_a_learners_machines(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    two = {"any_of": [{"infra": "lambda", "accelerators": "H200:2"}], "num_nodes": 2}
    about = rented(policy, tasks, tmp_path, learner=two)
    apply_override(wish := dict(about.plan.tables), "learner.rank.processes=2")
    check(await probed("memory", subject(wish, tmp_path)), Status.OK)


async def test_workers_of_an_engine_are_shared_out_among_its_machines(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    two = {"any_of": [{"infra": "lambda", "accelerators": "H200:2"}], "num_nodes": 2}
    about = rented(policy, tasks, tmp_path, rollout=two)
    apply_override(wish := dict(about.plan.tables), "rollout.engine.tensor_parallel=4")
    check(await probed("memory", subject(wish, tmp_path)), Status.OK)
    apply_override(wish, "rollout.engine.tensor_parallel=8")
    few = "rollout: lambda H200:2 has 2 GPUs for rollout.engine.tensor_parallel / nodes = 4"
    check(await probed("memory", subject(wish, tmp_path)), Status.FAIL, few)


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the driver's program by one that lists two GPUs."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 81559\necho 81559\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("learner.rank.processes=3",), "this machine has 2 GPUs for learner.rank.processes = 3"),
        (
            ("rollout.engine.tensor_parallel=4",),
            "this machine has 2 GPUs for rollout.engine.tensor_parallel = 4",
        ),
        (
            ("rollout.engine.tensor_parallel=2", "rollout.engine.data_parallel=2"),
            "this machine has 2 GPUs for rollout.engine.tensor_parallel * data_parallel = 4",
        ),
        (
            ("learner.rank.processes=2", "launcher.learner.gpus=1"),
            "launcher.learner.gpus gives 1 GPU for learner.rank.processes = 2",
        ),
        (
            ("launcher.learner.gpus=1", "launcher.rollout.gpus=1", "launcher.rollout.replicas=2"),
            "launcher.SERVICE.gpus come to 3 for all replicas, this machine has 2",
        ),
    ],
)
async def test_more_gpus_than_there_are_here_are_refused(
    policy: Path, tasks: Path, tmp_path: Path, overrides: tuple[str, ...], words: str
) -> None:
    gpus = ("learner.rank.device=cuda", "rollout.engine.device=cuda")
    well = subject(spec(policy, tasks, *gpus, "learner.rank.processes=2"), tmp_path)
    check(await probed("memory", well), Status.OK)
    about = subject(spec(policy, tasks, *gpus, *overrides), tmp_path)
    check(await probed("memory", about), Status.FAIL, words)
