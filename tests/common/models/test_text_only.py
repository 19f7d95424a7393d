"""vLLM's processes find a stand-in of torchvision where there is none, and nothing else does."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from flotilla_common.models import text_only
from flotilla_common.models.text_only import add_to_python_path, find_stand_ins

# What the image processors of transformers do as they are imported.
USES = """
import torchvision
from torchvision import transforms as T
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as tvF

modes = {1: InterpolationMode.NEAREST, 2: tvF.InterpolationMode.BICUBIC}

class Resize(T.Resize):
    def forward(self, image: "T.Image | None") -> T.Image | None: ...

try:
    T.Compose([])
except RuntimeError as error:
    print(error)
"""


def test_every_name_is_found_and_none_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    # An engine that another test runs in this process has found them.
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "stand_ins" not in path])
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    folder = find_stand_ins()
    assert find_spec("torchvision") is None and folder is not None
    ended = subprocess.run(
        [sys.executable, "-c", USES],
        env={**os.environ, **add_to_python_path(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "images are not read: torchvision is not installed\n"


def test_a_real_torchvision_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_only, "find_spec", lambda name: name)
    assert find_stand_ins() is None
    assert add_to_python_path(None) == {}


def test_what_was_on_the_path_stays_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/own")
    assert add_to_python_path("/more") == {"PYTHONPATH": f"/own{os.pathsep}/more"}
    monkeypatch.delenv("PYTHONPATH")
    assert add_to_python_path("/more") == {"PYTHONPATH": "/more"}
