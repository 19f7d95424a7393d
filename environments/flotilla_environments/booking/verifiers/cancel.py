# pyright: basic
def validate_task(env, final_answer=None) -> dict:
    """Passes when the booking that was asked for is gone and nothing else changed."""
    errors, successes = [], []
    env.instance.load()
    if final_answer is None:
        errors.append("[X] the agent never said that it was done")
    seed, current = env.db("seed"), env.db("current")
    facts = {row["name"]: row["value"] for row in seed.table("task_facts").all()}
    target = int(facts["booking_id"])
    before = {row["id"]: row for row in seed.table("bookings").all()}
    after = {row["id"]: row for row in current.table("bookings").all()}
    if target in after:
        errors.append(f"[X] booking {target} was not cancelled")
    else:
        successes.append(f"[C] booking {target} was cancelled")
    for booking_id in sorted((before.keys() | after.keys()) - {target}):
        if after.get(booking_id) != before.get(booking_id):
            errors.append(f"[X] booking {booking_id} was made, changed or cancelled")
    if seed.table("hotels").all() != current.table("hotels").all():
        errors.append("[X] hotels were changed")
    return {"score": 0 if errors else 1, "passed": successes, "failed": errors}
