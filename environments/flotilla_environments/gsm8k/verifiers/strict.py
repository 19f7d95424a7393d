# pyright: basic
import re

MARKED = re.compile(r"#### (-?[0-9.,]+)")


def marked_number(text):
    """The number after the first "#### ", its commas left out; None where there is none."""
    found = MARKED.search(text)
    return found[1].replace(",", "") if found else None


def validate_task(env, final_answer=None) -> dict:
    """Passes when the number after "####" is, to the letter, the expected one."""
    facts = {row["name"]: row["value"] for row in env.db("seed").table("task_facts").all()}
    number = marked_number(final_answer or "")
    if number == facts["answer"]:
        errors, successes = [], [f"[C] the answer is {number}"]
    elif number is None:
        errors, successes = ['[X] no number follows "#### "'], []
    else:
        errors, successes = [f"[X] the answer is {number}, expected {facts['answer']}"], []
    return {"score": 0 if errors else 1, "passed": successes, "failed": errors}
