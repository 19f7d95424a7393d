"""The estimate of the remaining time, against recorded runs of `make demo`."""

import pytest

from flotilla_learner.run.remaining_time import RemainingTime, RunPlan

# 50 steps of 96 attempts. Each evaluation has 192 tasks, once, or three times before and after.
DEMO = RunPlan(50, 96, {"before": 576, "during": 192, "after": 576}, every=10)
# Of two runs: the seconds from the first attempt to the end; and for each step, with checkpoints
# after every tenth, the seconds to its end and the attempts that had arrived by then.
RECORDED = (
    576.9,
    (
        (58.9, 768),
        (61.5, 770),
        (68.8, 864),
        (75.5, 960),
        (85.4, 1061),
        (93.8, 1158),
        (104.8, 1256),
        (114.0, 1349),
        (122.8, 1459),
        (130.1, 1537),
        (159.6, 1888),
        (168.3, 1985),
        (175.9, 2080),
        (186.4, 2176),
        (197.7, 2272),
        (206.1, 2368),
        (217.6, 2495),
        (227.8, 2600),
        (231.0, 2600),
        (240.9, 2704),
        (270.2, 3056),
        (279.7, 3152),
        (286.4, 3248),
        (296.4, 3366),
        (299.1, 3368),
        (305.3, 3464),
        (311.9, 3560),
        (319.9, 3656),
        (324.8, 3752),
        (333.6, 3848),
        (363.1, 4200),
        (369.8, 4296),
        (376.5, 4392),
        (384.1, 4488),
        (389.3, 4584),
        (396.1, 4680),
        (403.1, 4776),
        (411.4, 4872),
        (418.7, 4968),
        (426.2, 5064),
        (452.5, 5352),
        (458.3, 5448),
        (466.8, 5544),
        (474.2, 5640),
        (482.2, 5736),
        (490.2, 5832),
        (497.3, 5928),
        (504.3, 6024),
        (512.0, 6120),
        (517.6, 6184),
    ),
)
# Other programs of this machine ended after the twentieth step, and it went on faster.
SLOW_AT_FIRST = (
    617.6,
    (
        (69.8, 768),
        (72.1, 768),
        (81.0, 865),
        (89.2, 960),
        (97.4, 1056),
        (109.1, 1178),
        (116.5, 1260),
        (122.2, 1344),
        (133.0, 1441),
        (142.3, 1536),
        (181.4, 1912),
        (191.2, 2016),
        (200.7, 2112),
        (208.2, 2145),
        (215.0, 2221),
        (221.2, 2304),
        (242.9, 2418),
        (248.8, 2496),
        (269.6, 2603),
        (281.4, 2689),
        (324.7, 3048),
        (336.2, 3168),
        (339.7, 3168),
        (346.8, 3264),
        (355.9, 3360),
        (363.5, 3456),
        (374.7, 3552),
        (383.6, 3648),
        (396.3, 3744),
        (403.0, 3840),
        (438.2, 4222),
        (441.2, 4224),
        (448.0, 4320),
        (455.1, 4416),
        (463.5, 4516),
        (469.1, 4608),
        (476.0, 4704),
        (483.0, 4800),
        (491.8, 4896),
        (499.1, 4992),
        (524.4, 5344),
        (531.5, 5440),
        (539.5, 5531),
        (549.3, 5632),
        (557.8, 5728),
        (563.2, 5824),
        (567.7, 5860),
        (573.1, 5980),
        (578.5, 6112),
        (580.7, 6144),
    ),
)


def shares(run: tuple[float, tuple[tuple[float, int], ...]], begun: int = 0) -> dict[int, float]:
    """Return by step the estimate over the actual rest of a start that began after a step."""
    end, steps = run
    at, before = steps[begun - 1] if begun else (0.0, 0)
    remaining = RemainingTime(DEMO)
    found: dict[int, float] = {}
    for step, (seconds, received) in enumerate(steps[begun:], begun + 1):
        left = remaining.end_step(step, seconds - at, 0.0, received - before)
        if step == begun + 1:
            assert left is None, "one step says nothing yet"
        else:
            assert left is not None
            found[step] = left / (end - seconds)
    return found


@pytest.mark.parametrize("begun", [0, 5, 20, 27, 40])
def test_the_remaining_time_is_right_within_30_percent_from_the_second_step_of_a_start(
    begun: int,
) -> None:
    found = shares(RECORDED, begun)
    assert all(0.7 < share < 1.3 for share in found.values()), found


def test_an_estimate_is_right_as_long_as_the_machine_is_as_fast() -> None:
    found = shares(SLOW_AT_FIRST)
    assert all(0.7 < found[step] < 1.3 for step in range(2, 17)), found


def test_a_step_that_waits_for_an_evaluation_does_not_count_as_a_usual_one() -> None:
    plan = RunPlan(100, 10, {"before": 100, "during": 0, "after": 0}, every=0)
    remaining = RemainingTime(plan)
    # The evaluation takes 5,500 s; steps take 2 s, and training them is the slow part.
    assert remaining.end_step(1, 5_500.0, 5_400.0, 120) is None
    left = [remaining.end_step(step, 5_500.0 + 2.0 * step, 5_400.0, 120) for step in range(2, 14)]
    assert left[-1] == pytest.approx(2.0 * 87)


def test_slow_training_counts_even_if_attempts_arrive_fast() -> None:
    plan = RunPlan(20, 64, {"before": 640, "during": 64, "after": 640}, every=5)
    remaining = RemainingTime(plan)
    assert remaining.end_step(1, 80.0, 0.0, 768) is None
    left = remaining.end_step(2, 140.0, 0.0, 832)
    # 18 steps of 60 s, 3 short evaluations and a long one: a minute or two.
    assert left == pytest.approx(18 * 60.0, rel=0.15)


def test_a_run_without_evaluations_has_only_its_steps_left() -> None:
    remaining = RemainingTime(RunPlan(4, 8, {"before": 0, "during": 0, "after": 0}, every=0))
    assert remaining.end_step(1, 10.0, None, 0) is None
    assert remaining.end_step(2, 20.0, 1.0, 8) == pytest.approx(20.0)
    assert remaining.end_step(4, 40.0, 1.0, 24) == 0.0
