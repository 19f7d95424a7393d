# pyright: basic
def validate_task(env, final_answer=None) -> int:
    """Passes when the booking that was asked for is gone and nothing else changed."""
    errors, successes = [], []
    env.instance.load()
    seed, current = env.db("seed"), env.db("current")
    facts = {row["name"]: row["value"] for row in seed.table("task_facts").all()}
    booking_id = int(facts["booking_id"])
    if current.table("bookings").eq("id", booking_id).all():
        errors.append(f"[X] booking {booking_id} was not cancelled")
    else:
        successes.append(f"[C] booking {booking_id} was cancelled")
    changes = [{"table": "bookings", "pk": booking_id, "type": "delete"}]
    try:
        seed.diff(current).expect_only_v2([] if errors else changes)
        if successes:
            successes.append("[C] nothing else changed")
    except AssertionError as error:
        errors.append(f"[X] unexpected changes: {str(error)[:300]}")
    print(f">>> ERROR_ACCUMULATOR >>>\n{errors}\n<<< ERROR_ACCUMULATOR <<<")
    print(f">>> SUCCESS_ACCUMULATOR >>>\n{successes}\n<<< SUCCESS_ACCUMULATOR <<<")
    return 0 if errors else 1
