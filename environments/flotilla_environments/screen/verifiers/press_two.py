# pyright: basic
def validate_task(env, final_answer=None) -> dict:
    """Passes when the two tiles that were asked for are clicked in order, and nothing else is."""
    errors, successes = [], []
    env.instance.load()
    if final_answer is None:
        errors.append("[X] the agent never said that it was done")
    seed, current = env.db("seed"), env.db("current")
    facts = {row["name"]: row["value"] for row in seed.table("task_facts").all()}
    targets = [int(facts["first_tile"]), int(facts["second_tile"])]
    clicks = sorted(current.table("clicks").all(), key=lambda row: row["id"])
    clicked = [row["tile_id"] for row in clicks]
    if len(clicked) != 2:
        errors.append(f"[X] {len(clicked)} clicks were made, expected 2")
    for found, target in zip(clicked, targets, strict=False):
        if found == target:
            successes.append(f"[C] tile {target} was clicked")
        else:
            errors.append(f"[X] tile {found} was clicked, expected {target}")
    if seed.table("tiles").all() != current.table("tiles").all():
        errors.append("[X] tiles were changed")
    return {"score": 0 if errors else 1, "passed": successes, "failed": errors}
