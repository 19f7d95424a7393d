# pyright: basic
def validate_task(env, final_answer=None) -> dict:
    """Passes when the issue that was asked for is closed and nothing else changed."""
    errors, successes = [], []
    env.instance.load()
    if final_answer is None:
        errors.append("[X] the agent never said that it was done")
    seed, current = env.db("seed"), env.db("current")
    facts = {row["name"]: row["value"] for row in seed.table("task_facts").all()}
    target = int(facts["issue_id"])
    expected = {"status": "closed"}
    before = {row["id"]: row for row in seed.table("issues").all()}
    after = {row["id"]: row for row in current.table("issues").all()}
    for field, value in expected.items():
        found = after.get(target, {}).get(field)
        if found == value:
            successes.append(f"[C] {field} is {value}")
        else:
            errors.append(f"[X] {field} is {found!r}, expected {value!r}")
    for issue_id in sorted(before.keys() | after.keys()):
        was, now = before.get(issue_id, {}), after.get(issue_id, {})
        intended = expected if issue_id == target else {}
        if {**was, **intended} != {**now, **intended}:
            errors.append(f"[X] issue {issue_id} has another change")
    return {"score": 0 if errors else 1, "passed": successes, "failed": errors}
