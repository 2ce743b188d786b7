from holdfast_daemon.limits.allowance import Allowance


def test_an_allowance_is_shared_and_paid_in_advance() -> None:
    now = 100.0
    waits: list[float] = []
    allowance = Allowance(clock=lambda: now)
    for nbytes in (50, 50, 100):
        allowance.take(nbytes, 100, waits.append)
    assert waits == [0.5, 1.0]
    now = 200.0  # what was not used is not saved up
    allowance.take(100, 100, waits.append)
    allowance.take(100, 100, waits.append)
    assert waits == [0.5, 1.0, 1.0]
    allowance.take(10**12, 0, waits.append)
    assert len(waits) == 3
