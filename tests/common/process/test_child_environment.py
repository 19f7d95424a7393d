"""The part of its environment that a process passes to its children."""

import os
from pathlib import Path

import pytest

from flotilla_common.process.child_environment import child_environment, seen_by_children

SECRETS = {
    "FLEET_API_KEY": "canary-fleet-0001",
    "WANDB_API_KEY": "canary-wandb-0002",
    "OPENAI_API_KEY": "canary-openai-0003",
    "HF_TOKEN": "canary-hub-0004",
    "FLOTILLA_TOKEN": "canary-run-0005",
    "FLOTILLA_REMOTE_OPTIONS": '{"key": "canary-store-0006"}',
    "DATABASE_URL": "postgres://u:canary-0007@h/db",
    "SLURM_JWT_KEY": "canary-slurm-0008",
    "SSH_AUTH_SOCK": "/tmp/agent",
    "KUBECONFIG": "/root/.kube/config",
    "NPM_CONFIG__AUTH": "canary-npm-0009",
}
ANYBODY = {
    "PATH": "/usr/bin",
    "HOME": "/home/u",
    "LANG": "C.UTF-8",
    "LC_ALL": "C",
    "TZ": "UTC",
    "TMPDIR": "/scratch",
    "https_proxy": "http://u:password@proxy:3128",
    "NO_PROXY": "localhost",
    "SSL_CERT_FILE": "/etc/ca.pem",
    "REQUESTS_CA_BUNDLE": "/etc/ca.pem",
    "LD_LIBRARY_PATH": "/usr/local/cuda/lib64",
    "PYTHONPATH": "/code",
    "CUDA_VISIBLE_DEVICES": "",
    "FLOTILLA_UNIT": "/runs:run/learner-0#ab",
}
OURS = {
    "CUDA_HOME": "/usr/local/cuda",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "NCCL_SOCKET_IFNAME": "ib0",
    "NCCL_IB_HCA": "mlx5",
    "NVIDIA_DRIVER_CAPABILITIES": "compute",
    "NVTE_FLASH_ATTN": "1",
    "GLOO_SOCKET_IFNAME": "ib0",
    "HF_HOME": "/models",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_CACHE": "/models",
    "VLLM_ATTENTION_BACKEND": "FLASH_ATTN",
    "VLLM_MAX_TOKENS_PER_EXPERT_FUSED_MOE": "65536",
    "TORCHINDUCTOR_CACHE_DIR": "/scratch/inductor",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TRITON_CACHE_DIR": "/scratch/triton",
    "OMP_NUM_THREADS": "8",
    "MKL_NUM_THREADS": "8",
    "TOKENIZERS_PARALLELISM": "false",
    "SLURM_JOB_ID": "7",
    "LD_PRELOAD": "/usr/lib/libjemalloc.so",
    "HIP_VISIBLE_DEVICES": "0",
    "UCX_TLS": "rc",
    "FI_PROVIDER": "efa",
    "GRPC_VERBOSITY": "ERROR",
    "CC": "gcc",
}
EVERYTHING = {**SECRETS, **ANYBODY, **OURS}


def test_a_strangers_program_gets_what_any_program_needs_and_no_more() -> None:
    shared = {"LD_LIBRARY_PATH", "HIP_VISIBLE_DEVICES"} & OURS.keys()
    found = child_environment(environ=EVERYTHING)
    assert found == {**ANYBODY, **{name: OURS[name] for name in shared}}


def test_engines_and_ranks_get_all_that_drivers_and_libraries_read_and_no_secret() -> None:
    assert child_environment(ours=True, environ=EVERYTHING) == {**ANYBODY, **OURS}


def test_what_is_named_is_given_secret_or_not() -> None:
    found = child_environment("FLEET_API_KEY", "OPENAI_*", "ABSENT", environ=EVERYTHING)
    added = {name: SECRETS[name] for name in ("FLEET_API_KEY", "OPENAI_API_KEY")}
    assert found.items() >= added.items()
    assert found.keys() & SECRETS.keys() == added.keys()


def test_a_file_that_holds_a_secret_is_no_secret(tmp_path: Path) -> None:
    where = {"HF_TOKEN_PATH": str(tmp_path), "HF_TOKEN": "canary-hub-0004"}
    assert child_environment(ours=True, environ=where) == {"HF_TOKEN_PATH": str(tmp_path)}


def test_it_is_that_of_this_process_unless_another_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MINE_API_KEY", "canary-mine-0010")
    monkeypatch.setenv("TZ", "UTC")
    found = child_environment()
    assert found["TZ"] == "UTC" and "MINE_API_KEY" not in found


def test_what_a_library_starts_sees_no_more_either_and_then_all_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_SERVICE", "old")
    before = dict(os.environ)
    with seen_by_children("WANDB_*"):
        seen = dict(os.environ)
        os.environ["WANDB_SERVICE"] = "new"
    assert "WANDB_API_KEY" in seen and seen == child_environment("WANDB_*", environ=before)
    assert dict(os.environ) == {**before, "WANDB_SERVICE": "new"}
