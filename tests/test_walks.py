"""The walks of AGENTS.md lead through modules that exist."""

import importlib
import re

import pytest

from tests.support.repository import ROOT

TEXT = (ROOT / "AGENTS.md").read_text()
SECTION = TEXT.split("## Four walks")[1].split("\n## ")[0]
WALKS = {
    re.match(r"\*\*(.*?)\*\*", part)[1]: re.findall(r"^\d\. `(flotilla_[^`]+)\.py`", part, re.M)  # type: ignore[index]
    for part in re.split(r"\n(?=\*\*)", SECTION)[1:]
}


def test_there_are_four_walks_of_five_to_eight_files() -> None:
    assert list(WALKS) == ["A trajectory", "A tool call", "A weight update", "StartRun"]
    assert all(5 <= len(files) <= 8 for files in WALKS.values())


# vLLM's own imports warn.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "file", [file for files in WALKS.values() for file in files], ids=lambda file: file
)
def test_a_module_of_a_walk_can_be_imported(file: str) -> None:
    assert importlib.import_module(file.replace("/", ".")).__doc__
