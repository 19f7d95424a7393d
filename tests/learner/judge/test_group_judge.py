"""What a judge is told comes from the file that the spec names."""

from pathlib import Path

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import parse_config
from flotilla_common.spec.spec_loading import load_spec
from flotilla_learner.config.judge import JudgeConfig
from flotilla_learner.judge.adapters.chat_judge import ChatJudge
from flotilla_learner.judge.group_judge import GroupJudge, open_group_judge
from flotilla_learner.judge.question import INSTRUCTIONS
from tests.support.scripted_judge import write_words

SPEC = """
[learner.judge]
url = "http://h/v1"
model = "m"
max_calls = 1
instructions = "judging.txt"
"""


def opened(config: JudgeConfig) -> GroupJudge:
    return open_group_judge(ChatJudge(config), config, write_words)


def config_of(folder: Path) -> JudgeConfig:
    """The table of a spec in a folder."""
    (folder / "run.toml").write_text(SPEC)
    table = load_spec(folder / "run.toml")["learner"]["judge"]
    return parse_config(JudgeConfig, table, where="spec", section="learner.judge")


async def test_instructions_beside_the_spec_are_read_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "judging.txt").write_text("Prefer short answers.\n")
    judge = opened(config_of(tmp_path))
    assert judge.instructions == "Prefer short answers."
    await judge.close()


async def test_without_a_file_the_task_itself_is_what_counts() -> None:
    table = {"url": "http://h/v1", "model": "m", "max_calls": 1}
    judge = opened(parse_config(JudgeConfig, table, where="spec"))
    assert judge.instructions == INSTRUCTIONS
    await judge.close()


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff\xfe"])
def test_instructions_that_cannot_be_read_are_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "judging.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=r"learner\.judge\.instructions: .*judging\.txt"):
        opened(config_of(tmp_path))
