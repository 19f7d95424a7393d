"""What is used of a service, and how long it was waited for."""

from flotilla_rollout.work.service_use import ServiceUse


def test_tokens_add_up() -> None:
    use = ServiceUse()
    use.note_answer(prompt_tokens=10, sampled_tokens=3)
    use.note_answer(prompt_tokens=20, sampled_tokens=1)
    metrics = use.collect_metrics(now=0.0)
    assert (metrics["tokens/prompt_total"], metrics["tokens/sampled_total"]) == (30.0, 4.0)


def test_a_wait_begins_once_and_lasts_until_nothing_is_waited_for() -> None:
    use = ServiceUse()
    assert (use.waiting_s(5.0), use.waited_s(5.0)) == (0.0, 0.0)
    use.note_state("", 5.0)
    use.note_state("away", 10.0)
    # What is waited for may change.
    use.note_state("out of credit", 12.0)
    assert (use.reason, use.waiting_s(15.0), use.waited_s(15.0)) == ("out of credit", 5.0, 5.0)
    use.note_state("", 17.0)
    assert (use.reason, use.waiting_s(20.0), use.waited_s(20.0)) == ("", 0.0, 7.0)
    use.note_state("away", 30.0)
    metrics = use.collect_metrics(now=31.0)
    assert metrics["service/waiting_seconds"] == 1.0
    assert metrics["service/waited_seconds_total"] == 8.0
