"""A wheel is tried as a user gets it: alone, in an empty environment."""

import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tools import wheel_check

METADATA = "Metadata-Version: 2.4\nName: flotilla-rl-x\nVersion: 1.0\n"
SCRIPT = "[console_scripts]\nflotilla-x = flotilla_x.program:main\n"
PROGRAM = "import sys\n\ndef main():\n    print('usage:', *sys.argv[1:])\n"


def make_wheel(folder: Path, **modules: str) -> Path:
    """Make a wheel with a package of these modules, and a command."""
    path = folder / "flotilla_rl_x-1.0-py3-none-any.whl"
    record = "flotilla_rl_x-1.0.dist-info/"
    with ZipFile(path, "w") as archive:
        archive.writestr("flotilla_x/__init__.py", "")
        for name, text in {"program": PROGRAM, **modules}.items():
            archive.writestr(f"flotilla_x/{name}.py", text)
        archive.writestr(f"{record}METADATA", METADATA)
        archive.writestr(f"{record}WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{record}entry_points.txt", SCRIPT)
        archive.writestr(f"{record}RECORD", "")
    return path


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_OFFLINE", "1")


def test_a_wheel_that_is_whole_is_told_with_its_commands(tmp_path: Path) -> None:
    told = wheel_check.check_wheel(make_wheel(tmp_path), sys.executable)
    assert told == "flotilla_x; commands flotilla-x; 0 modules need an extra"


def test_a_module_may_miss_what_an_extra_brings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(wheel_check.OPTIONAL, "flotilla-rl-x", {"vllm"})
    told = wheel_check.check_wheel(make_wheel(tmp_path, engine="import vllm.lora"), sys.executable)
    assert told.endswith("; 1 modules need an extra")


@pytest.mark.parametrize(
    ("modules", "told"),
    [
        ({"engine": "import vllm"}, "flotilla_x.engine needs vllm"),
        # This checkout is importable for the test, and is not for the wheel.
        ({"engine": "import flotilla_common"}, "flotilla_x.engine needs flotilla_common"),
        ({"engine": "1 / 0"}, "ZeroDivisionError"),
        ({"program": "def main():\n    raise SystemExit('broken')"}, "broken"),
    ],
)
def test_a_wheel_that_lacks_something_is_refused_and_the_error_names_it(
    tmp_path: Path, modules: dict[str, str], told: str
) -> None:
    with pytest.raises(wheel_check.WheelError, match=told):
        wheel_check.check_wheel(make_wheel(tmp_path, **modules), sys.executable)


def test_a_wheel_takes_no_name_that_a_users_project_may_have(tmp_path: Path) -> None:
    with ZipFile(path := make_wheel(tmp_path), "a") as archive:
        archive.writestr("services/__init__.py", "")
    with pytest.raises(wheel_check.WheelError, match="installs services"):
        wheel_check.top_levels(path)
