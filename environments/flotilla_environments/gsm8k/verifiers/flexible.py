# pyright: basic
import re

NUMBER = re.compile(r"-?[0-9.,]+")


def last_number(text):
    """The last number of a text as it is written, commas included; None where there is none."""
    found = [number for number in NUMBER.findall(text) if number != "."]
    return found[-1] if found else None


def validate_task(env, final_answer=None) -> dict:
    """Passes when the last number of the answer is, to the letter, the expected one."""
    facts = {row["name"]: row["value"] for row in env.db("seed").table("task_facts").all()}
    number = last_number(final_answer or "")
    if number == facts["answer"]:
        errors, successes = [], [f"[C] the answer is {number}"]
    else:
        errors, successes = [f"[X] the last number is {number}, expected {facts['answer']}"], []
    return {"score": 0 if errors else 1, "passed": successes, "failed": errors}
