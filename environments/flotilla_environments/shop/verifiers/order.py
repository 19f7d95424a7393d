# pyright: basic
def validate_task(env, final_answer=None) -> dict:
    """Passes when the order that was asked for is the only change."""
    errors, successes = [], []
    env.instance.load()
    if final_answer is None:
        errors.append("[X] the agent never said that it was done")
    seed, current = env.db("seed"), env.db("current")
    facts = {row["name"]: row["value"] for row in seed.table("task_facts").all()}
    expected = {
        "customer_id": int(facts["customer_id"]),
        "item_id": int(facts["item_id"]),
        "quantity": int(facts["n"]),
    }
    orders = current.table("orders").all()  # the seed has none
    if len(orders) == 1:
        successes.append("[C] one order was made")
    else:
        errors.append(f"[X] {len(orders)} orders were made, expected 1")
    for row in orders:
        for field, value in expected.items():
            if row[field] == value:
                successes.append(f"[C] {field} is {value}")
            else:
                errors.append(f"[X] {field} is {row[field]}, expected {value}")
    for table in ("customers", "items"):
        if seed.table(table).all() != current.table(table).all():
            errors.append(f"[X] {table} were changed")
    return {"score": 0 if errors else 1, "passed": successes, "failed": errors}
