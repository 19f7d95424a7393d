# pyright: basic
def validate_task(env, final_answer=None) -> int:
    """Passes when the issue that was asked for is assigned and nothing else changed."""
    errors, successes = [], []
    env.instance.load()
    seed, current = env.db("seed"), env.db("current")
    facts = {row["name"]: row["value"] for row in seed.table("task_facts").all()}
    issue_id = int(facts["issue_id"])
    expected = {"assignee": facts["user"]}
    issue = current.table("issues").eq("id", issue_id).all()[0]
    for field, value in expected.items():
        if issue[field] == value:
            successes.append(f"[C] {field} is {value}")
        else:
            errors.append(f"[X] {field} is {issue[field]!r}, expected {value!r}")
    change = {
        "table": "issues",
        "pk": issue_id,
        "type": "modify",
        "resulting_fields": list(expected.items()),
        "no_other_changes": True,
    }
    try:
        seed.diff(current).expect_only_v2([change])
        if successes:
            successes.append("[C] nothing else changed")
    except AssertionError as error:
        errors.append(f"[X] unexpected changes: {str(error)[:300]}")
    print(f">>> ERROR_ACCUMULATOR >>>\n{errors}\n<<< ERROR_ACCUMULATOR <<<")
    print(f">>> SUCCESS_ACCUMULATOR >>>\n{successes}\n<<< SUCCESS_ACCUMULATOR <<<")
    return 0 if errors else 1
