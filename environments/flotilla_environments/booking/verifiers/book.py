# pyright: basic
def validate_task(env, final_answer=None) -> dict:
    """Passes when the booking that was asked for is the only change."""
    errors, successes = [], []
    env.instance.load()
    if final_answer is None:
        errors.append("[X] the agent never said that it was done")
    seed, current = env.db("seed"), env.db("current")
    facts = {row["name"]: row["value"] for row in seed.table("task_facts").all()}
    expected = {
        "guest": facts["guest"],
        "city": facts["city"],
        "hotel_id": int(facts["hotel_id"]),
    }
    before = {row["id"]: row for row in seed.table("bookings").all()}
    after = {row["id"]: row for row in current.table("bookings").all()}
    added = [row for booking_id, row in after.items() if booking_id not in before]
    if len(added) == 1:
        successes.append("[C] one booking was made")
    else:
        errors.append(f"[X] {len(added)} bookings were made, expected 1")
    for row in added:
        for field, value in expected.items():
            if row[field] == value:
                successes.append(f"[C] {field} is {value}")
            else:
                errors.append(f"[X] {field} is {row[field]}, expected {value}")
    for booking_id, row in before.items():
        if after.get(booking_id) != row:
            errors.append(f"[X] booking {booking_id} was changed or cancelled")
    if seed.table("hotels").all() != current.table("hotels").all():
        errors.append("[X] hotels were changed")
    return {"score": 0 if errors else 1, "passed": successes, "failed": errors}
