"""Tasks of the shipped apps with one fault each, by kind."""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from flotilla_environments.reference_policies import plan_calls
from flotilla_environments.tasks import make_solution, make_task

Made = tuple[dict[str, Any], dict[str, Any]]

_PASSING = "def verify(env, final_answer=None):\n    return 1\n"
_PREFIX = "import random, time, datetime, uuid\n"


def made(env: str, index: int, split: Any = "train") -> Made:
    task = make_task(env, split, index)
    return task, make_solution(task)


def _with_verifier(source: str) -> Callable[[Made], Made]:
    return lambda given: ({**given[0], "verifier_func": source}, given[1])


def _gated(condition: str) -> Callable[[Made], Made]:
    """The task's own verifier passes too, and then only if the condition holds."""

    def plant(given: Made) -> Made:
        own = given[0]["verifier_func"].replace("def validate_task", "def _own")
        source = (
            f"{_PREFIX}def verify(env, final_answer=None):\n"
            f"    score = _own(env, final_answer)['score']\n    return {condition}\n\n{own}"
        )
        return {**given[0], "verifier_func": source}, given[1]

    return plant


def _hint(text: Callable[[dict[str, Any], str], str]) -> Callable[[Made], Made]:
    """The prompt says the id that the last call needs."""

    def plant(given: Made) -> Made:
        name, arguments = plan_calls(given[0])[-1]
        argument = next(each for each in arguments if each.endswith("_id"))
        said = text({"call": name, "name": argument, "value": arguments[argument]}, argument)
        return {**given[0], "prompt": f"{given[0]['prompt']} {said}"}, given[1]

    return plant


def _without_tool(given: Made) -> Made:
    names = [call["name"] for call in given[1]["calls"]]
    return {**given[0], "offered_tools": names[:1]}, given[1]


def _with_unknown_tool(given: Made) -> Made:
    return {**given[0], "offered_tools": ["teleport", given[1]["calls"][0]["name"]]}, given[1]


def _wrong_solution(given: Made) -> Made:
    calls = [*given[1]["calls"][:-1]]
    return given[0], {**given[1], "calls": calls}


def _wrong_table(given: Made) -> Made:
    source = given[0]["verifier_func"]
    table = {"booking": "bookings", "tracker": "issues", "shop": "orders"}[given[0]["env_id"]]
    return {**given[0], "verifier_func": source.replace(f'"{table}"', '"task_facts"')}, given[1]


def _naming(**fields: str) -> Callable[[Made], Made]:
    return lambda given: ({**given[0], **fields}, given[1])


_CRASH = "def verify(env, final_answer=None):\n    return env.db('current').no_such()\n"
_MISSING = (
    "def verify(env, final_answer=None):\n"
    "    rows = env.db('current').table('task_facts').eq('name', 'nothing').all()\n"
    "    return rows[0]['value']\n"
)
_ANY_CLAIM = (
    "def verify(env, final_answer=None):\n"
    "    return 1.0 if 'success' in (final_answer or '').lower() else 0.0\n"
)
_ANSWERED = "def verify(env, final_answer=None):\n    return 0 if final_answer is None else 1\n"


def _lenient(given: Made) -> Made:
    """Anything that was added or changed in the app's main table passes."""
    table = {"booking": "bookings", "tracker": "issues", "shop": "orders"}[given[0]["env_id"]]
    source = (
        "def verify(env, final_answer=None):\n"
        f"    before, after = (env.db(d).table('{table}').all() for d in ('seed', 'current'))\n"
        "    return 1 if before != after else 0\n"
    )
    return {**given[0], "verifier_func": source}, given[1]


FAULTS: dict[str, Callable[[Made], Made]] = {
    "always passes": _with_verifier(_PASSING),
    "never passes": _with_verifier("def verify(env, final_answer=None):\n    return 0\n"),
    "passes on any claim of success": _gated("score or 'success' in (final_answer or '')"),
    "passes on nothing but a claim": _with_verifier(_ANY_CLAIM),
    "passes on any answer": _with_verifier(_ANSWERED),
    "reads the words of an answer": _gated("score or 'reservation made' in (final_answer or '')"),
    "reads an exact answer": _gated("score or final_answer == 'All set!'"),
    "reads the solution's own word": _gated("1 if final_answer == 'done' else score"),
    "grades at random": _gated("score if random.random() < 0.5 else 0"),
    "grades untouched worlds at random": _gated("score or int(random.random() < 0.5)"),
    "grades by the clock": _gated("score if int(time.time()) % 2 else 0"),
    "grades by the microsecond": _gated("score * (datetime.datetime.now().microsecond % 2)"),
    "grades by a drawn id": _gated("score * (uuid.uuid4().int % 2)"),
    "compares the wrong table": _wrong_table,
    "passes on any change": _lenient,
    "crashes": _with_verifier(_CRASH),
    "finds no row": _with_verifier(_MISSING),
    "returns no reward": _gated("'pass' if score else 'fail'"),
    "does not compile": _with_verifier("def verify(env:\n"),
    "is not solved by its solution": _wrong_solution,
    "does not offer a tool": _without_tool,
    "offers a tool that is not there": _with_unknown_tool,
    "names data that are not there": _naming(data_id="products"),
    "names a version that is not there": _naming(data_version="v9"),
    "names an environment that is not there": _naming(env_id="shopp"),
    "says the answer": _hint(lambda said, _: f"(Hint: {said['name']} is {said['value']})"),
    "says the call": _hint(lambda said, _: f"Use {said['call']}({said['name']}={said['value']})."),
    "says the id": _hint(lambda said, _: f"The id is {said['value']}."),
}


def trust(tasks: list[dict[str, Any]], path: Path) -> None:
    """Write the digests with which a gateway runs these verifiers without a sandbox."""
    sources = {task["verifier_func"] for task in tasks}
    path.write_text("".join(f"{sha256(each.encode()).hexdigest()}  x\n" for each in sources))
