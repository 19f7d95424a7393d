"""The course `arithmetic`: its demonstrations, its tokens and its evaluation."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from flotilla_environments.gsm8k.arithmetic import CHANGES, LARGEST, SMALLEST, Problem, make_problem
from flotilla_environments.gsm8k.verifiers.strict import marked_number
from flotilla_environments.tiny_policy import __main__ as cli
from flotilla_environments.tiny_policy import arithmetic
from flotilla_environments.tiny_policy.build import MANIFEST, build, recipe_digest, recipe_for
from flotilla_environments.tiny_policy.demonstrator import Habits
from flotilla_environments.tiny_policy.tokenizer import train_tokenizer
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer
from flotilla_rollout.dialects.template import TemplateDialect
from tests.environments.tiny_policy.conftest import MINI

DILIGENT = Habits(lazy={"arithmetic": 0.0}, sloppy=0.0)


@pytest.fixture(scope="module")
def tokenizer() -> TransformersTokenizer:
    return TransformersTokenizer(train_tokenizer(arithmetic.vocabulary_texts(), 2_000))


def passed(habits: Habits, count: int = 600) -> float:
    drawn = arithmetic.make_demonstrations(count, first=0, habits=habits, rng=random.Random(0))
    return sum(is_right(one.problem, one.text) for one in drawn) / count


def is_right(requests: Problem, text: str) -> bool:
    return marked_number(text) == str(requests.answer)


def test_a_diligent_demonstrator_solves_everything_and_a_lazy_one_nothing() -> None:
    assert passed(DILIGENT) == 1.0
    assert passed(replace(DILIGENT, lazy={"arithmetic": 1.0})) == 0.0


def test_a_fifth_to_a_third_of_the_demonstrations_pass() -> None:
    assert 0.2 < passed(Habits()) < 0.34


def test_slips_lead_to_no_number_that_is_not_taught() -> None:
    habits = replace(DILIGENT, sloppy=0.5)
    drawn = arithmetic.make_demonstrations(500, first=0, habits=habits, rng=random.Random(1))
    for one in drawn:
        *lines, last = one.text.split("\n")
        for line in lines:
            left, operator, right, result = line.replace("=", " ").split()
            value = int(left) + int(right) if operator == "+" else int(left) - int(right)
            assert value == int(result) and int(right) in CHANGES
        number = marked_number(last)
        assert number is not None and SMALLEST <= int(number) <= LARGEST


def test_every_word_and_number_is_one_token(tokenizer: TransformersTokenizer) -> None:
    words = {
        word.strip(".?")
        for index in range(300)
        for word in make_problem("test", index).question.split()
    }
    assert {word for word in words if len(tokenizer.encode(word)) != 1} == set()
    assert {n for n in range(SMALLEST, LARGEST + 1) if len(tokenizer.encode(str(n))) != 1} == set()


def test_a_demonstration_is_a_prompt_and_one_turn_of_the_policy(
    tokenizer: TransformersTokenizer,
) -> None:
    dialect = TemplateDialect(tokenizer)
    [one] = arithmetic.make_demonstrations(1, first=3, habits=DILIGENT, rng=random.Random(0))
    example = arithmetic.tokenize_episode(one, dialect, tokenizer)
    written = [token for token, own in zip(example.ids, example.policy, strict=True) if own]
    assert tokenizer.decode(written) == f"{make_problem('demo', 3).solution}<|im_end|>"
    text = tokenizer.decode(example.ids)
    requests = make_problem("demo", 3).question
    assert text.startswith(f"<|im_start|>user\n{requests}<|im_end|>\n<|im_start|>assistant\n")


def test_the_policy_of_a_course_is_built_and_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = replace(MINI, course="arithmetic")
    assert recipe_digest(recipe) != recipe_digest(MINI)
    folder = tmp_path / "policy"
    assert build(folder, recipe)
    assert json.loads((folder / MANIFEST).read_text())["recipe"]["course"] == "arithmetic"
    command = ["evaluate", "--course", "arithmetic", "--model", str(folder), "--tasks", "8"]
    assert cli.main(command) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "arithmetic" in line]
    assert len(rows) == 2


def test_each_course_has_its_recipe() -> None:
    assert recipe_for("tools", 3).demonstrations == 8_000
    assert recipe_for("arithmetic", 3).schedule.batch_size == 16
    assert recipe_for("arithmetic", 3).seed == 3
