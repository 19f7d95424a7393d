# pyright: basic
def validate_task(env, final_answer=None) -> dict:
    """Passes when the only click is on the tile that was asked for."""
    errors, successes = [], []
    env.instance.load()
    if final_answer is None:
        errors.append("[X] the agent never said that it was done")
    seed, current = env.db("seed"), env.db("current")
    facts = {row["name"]: row["value"] for row in seed.table("task_facts").all()}
    target = int(facts["first_tile"])
    clicks = current.table("clicks").all()  # the seed has none
    if len(clicks) != 1:
        errors.append(f"[X] {len(clicks)} clicks were made, expected 1")
    for row in clicks:
        if row["tile_id"] == target:
            successes.append(f"[C] tile {target} was clicked")
        else:
            errors.append(f"[X] tile {row['tile_id']} was clicked, expected {target}")
    if seed.table("tiles").all() != current.table("tiles").all():
        errors.append("[X] tiles were changed")
    return {"score": 0 if errors else 1, "passed": successes, "failed": errors}
