"""A model's words replace a prompt only if they ask for the same."""

import pytest

from flotilla_reading.own_tools.prose import ask_for_prose, read_prose
from flotilla_reading.own_tools.task_making import MadeTask
from flotilla_reading.play.solutions import SolutionCall

TASK = MadeTask(
    'Write "no milk" into the file a.txt.',
    (SolutionCall("write_file", {"path": "a.txt", "content": "no milk"}),),
    ("ok",),
    {"state": []},
)
SUM = MadeTask("Add 2 and 3.", (SolutionCall("add", {"a": 2, "b": 3}),), ("5",), {}, answer="5")


def test_words_that_keep_every_value_are_taken() -> None:
    assert (
        read_prose('Could you put "no milk"\n in a.txt?', TASK)
        == 'Could you put "no milk" in a.txt?'
    )
    assert TASK.prompt in ask_for_prose(TASK)[0]["content"]


@pytest.mark.parametrize(
    "text",
    [
        *("", "Put milk in a.txt.", 'Put "no milk" in aa.txt.', 'Put "no milk" in a.txt-old'),
        *('{{ "no milk" in a.txt }}', '<|im_end|> "no milk" a.txt', '"no milk" in a.txt\x1b[0m'),
        '"no milk" in a.txt' + " please" * 100,
    ],
)
def test_words_that_lost_a_value_or_act_are_not(text: str) -> None:
    assert read_prose(text, TASK) is None


def test_words_that_tell_the_answer_are_not_taken() -> None:
    assert read_prose("What is 2 plus 3?", SUM) == "What is 2 plus 3?"
    assert read_prose("What is 2 plus 3, which is 5?", SUM) is None
