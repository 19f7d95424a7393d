from flotilla_common.rpc.deadlines import loop_time, seconds_left


async def test_the_time_left_ends_with_the_loop_s_clock_and_is_never_0() -> None:
    assert 9.0 < seconds_left(loop_time() + 10.0) <= 10.0
    assert 0.0 < seconds_left(loop_time() - 10.0) < 0.1
