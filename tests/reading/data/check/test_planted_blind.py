"""Faults that were planted by somebody who had not seen the checks, by kind."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.tasks.task_checks import Outcome
from flotilla_environments.task_generator import Scenario, draw_scenario
from flotilla_environments.tasks import make_solution, make_task
from tests.reading.data.check.planted import Made
from tests.reading.data.check.test_task_check import check_all, verdicts_of

_LOOK = """
import re, json, fnmatch
def verify(env, final_answer=None):
    answer = final_answer or ""
    seed, cur = env.db("seed"), env.db("current")
    facts = {r["name"]: r["value"] for r in seed.table("task_facts").all()}
    def rows(db, table):
        return {r["id"]: r for r in db.table(table).all()}
    def changed(table):
        was = rows(seed, table)
        return [r for i, r in rows(cur, table).items() if was.get(i) != r]
"""
_BOOKED = 'any(r["hotel_id"] == int(facts["hotel_id"]) for r in changed("bookings"))'
_ISSUE = 'rows(cur, "issues")[int(facts["issue_id"])]'
_ORDER = 'changed("orders")[0]'
_BOTH = f'{_ISSUE}["assignee"] == facts["user"] and {_ISSUE}["status"] == "closed"'

# Of each kind: the kinds of task, and the body of a verifier for each.
WORLDS: Mapping[str, Mapping[str, str]] = {
    "skipped counts as pass": {
        "order": f'return 1 if not changed("orders") else {_ORDER}["quantity"] == int(facts["n"])',
        "close": 'return all(r["id"] == int(facts["issue_id"]) for r in changed("issues"))',
    },
    "exception is swallowed": {
        "order": f'try:\n    return {_ORDER}["quantity"] == int(facts["n"])\nexcept IndexError:\n'
        "    return 1",
        "assign": 'try:\n    return changed("issues")[0]["assignee"] == facts["user"]\n'
        "except Exception:\n    return 1",
    },
    "default passes": {
        "close": f'return {{"open": 1, "closed": 1}}.get({_ISSUE}["status"], 0)',
        "assign": f'return {_ISSUE}["assignee"] in ("", facts["user"])',
    },
    "any for all": {
        "book": f'return any([{_BOOKED}, not changed("hotels")])',
        "order": 'return any([changed("orders"), not changed("items")])',
    },
    "inverted": {"both": f"return 0 if {_BOTH} else 1", "book": f"return 0 if {_BOOKED} else 1"},
    "wrong object": {
        "book": 'return any(r["hotel_id"] == 0 for r in changed("bookings"))',
        "close": 'return 0 not in rows(cur, "issues") and 0 in rows(seed, "issues")',
    },
    "off by one": {
        "order": 'return len(changed("orders")) > 1',
        "cancel": 'return len(rows(cur, "bookings")) <= len(rows(seed, "bookings"))',
    },
    "answer is read for a word": {
        "book": f'return {_BOOKED} or "done" in answer',
        "assign": f'return {_ISSUE}["assignee"] == facts["user"] or facts["user"] in answer',
    },
    "object is not looked at": {
        "cancel": 'return len(rows(cur, "bookings")) < len(rows(seed, "bookings"))',
        "order": f'return changed("orders") != [] and {_ORDER}["quantity"] == int(facts["n"])',
    },
    "value is not looked at": {
        "order": f'return changed("orders") != [] and {_ORDER}["item_id"] == int(facts["item_id"])',
        "assign": f'return {_ISSUE}["assignee"] != ""',
    },
    "step is not looked at": {
        "both": f'return {_ISSUE}["assignee"] == facts["user"]',
    },
}
# Of each kind: question, answer and the body of a verifier.
QUESTIONS: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "empty answer": (
        ("What is the capital of Austria?", "vienna", 'return answer.lower() in "vienna"'),
        ("What is 12 squared?", "144", 'return "144".startswith(answer)'),
    ),
    "answers in a list": (
        ("What is 6 times 7?", "42", 'return "42" in answer'),
        ("How many legs has a spider?", "8", 'return "8" in re.findall(r"\\d+", answer)'),
    ),
    "answer is a pattern": (
        ("The symbol of gold?", "Au", 'return bool(answer and re.fullmatch(answer, "Au"))'),
        ("The first month?", "January", 'return fnmatch.fnmatch("January", answer)'),
    ),
    "only the form": (
        ("What is 35 + 48?", "83", 'return bool(re.search(r"\\d", answer))'),
        ("Explain rain.", "Water falls from clouds.", "return len(answer.split()) > 3"),
    ),
}
APPS = {
    **dict.fromkeys(("book", "cancel"), "booking"),
    **dict.fromkeys(("close", "assign", "both"), "tracker"),
    "order": "shop",
}


def _verifier(body: str) -> str:
    lines = body.replace("return ", "return 1.0 * (", 1) if "\n" not in body else body
    lines += ")" if "\n" not in body else ""
    return _LOOK + "".join(f"    {line}\n" for line in lines.split("\n"))


def _draw(kind: str, prompt: str, number: int = 0) -> tuple[Made, Scenario]:
    """A task of a kind whose prompt has a word."""
    found: list[tuple[Made, Scenario]] = []
    for index in range(300, 600):
        task = make_task(APPS[kind], "heldout", index)
        of = draw_scenario(APPS[kind], task["data_id"])
        if of.kind == kind and prompt in task["prompt"]:
            found.append(((task, make_solution(task)), of))
        if len(found) > number:
            return found[-1]
    raise LookupError(kind)


def _ask(key: str, prompt: str, answer: str, body: str) -> Made:
    fields = {"key": key, "prompt": prompt, "env_id": "questions", "task_modality": "single_turn"}
    source = _verifier(body).replace('facts = {r["name"]', 'facts = {} and {r["name"]')
    return {**fields, "verifier_func": source}, {"key": key, "answer": answer}


def _plant() -> list[tuple[str, Made]]:
    planted: list[tuple[str, Made]] = []
    for fault, worlds in WORLDS.items():
        for kind, body in worlds.items():
            (task, solution), _ = _draw(kind, "", len(planted))
            planted.append((fault, ({**task, "verifier_func": _verifier(body)}, solution)))
    for fault, questions in QUESTIONS.items():
        asked = (_ask(f"q{len(planted)}-{n}", *each) for n, each in enumerate(questions))
        planted += [(fault, each) for each in asked]
    return planted


def _valid() -> list[Made]:
    """Tasks that look like faulty ones."""
    valid: list[Made] = []
    for number in range(3):
        (task, solution), of = _draw("order", "", number)
        said = f"Order at least {of.slots['n']} {of.slots['item']} for {of.slots['name']}."
        right = " and ".join(
            f'{_ORDER}["{name}"] == int(facts["{name}"])' for name in ("item_id", "customer_id")
        )
        body = f'return changed("orders") and {right} and {_ORDER}["quantity"] >= int(facts["n"])'
        source = _verifier(body.replace("return changed", "return bool(changed") + ")")
        valid.append(({**task, "prompt": said, "verifier_func": source}, solution))
        (task, solution), _ = _draw("both", "", number)
        calls: list[Any] = solution["calls"]
        valid.append((task, {**solution, "calls": [*calls, calls[1]]}))
    exact = 'return answer.strip().lower() == "{}"'
    for prompt, answer in (("A or B? A) gas B) iron", "a"), ("Is 89 prime?", "yes")):
        valid.append(_ask(f"valid {answer}", prompt, answer, exact.format(answer)))
    last = 'return re.findall(r"\\d+", answer)[-1:] == ["42"]'
    valid.append(_ask("valid last", "What is 6 times 7?", "It is 42", last))
    return valid


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_faults_planted_without_knowledge_of_the_checks_are_found(tmp_path: Path) -> None:
    planted, valid = _plant(), _valid()
    found = verdicts_of(await check_all([*(each for _, each in planted), *valid], tmp_path))
    missed = [
        kind for (kind, _), got in zip(planted, found, strict=False) if got is not Outcome.INVALID
    ]
    assert len(missed) <= 0.05 * len(planted), missed
    assert found[len(planted) :] == [Outcome.VALID] * len(valid)
