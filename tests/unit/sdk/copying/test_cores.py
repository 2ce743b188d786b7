"""Copy threads share no core where cores are few, and may go anywhere again afterwards."""

from __future__ import annotations

import os

import pytest

from holdfast._copying.cores import apart


class Kernel:
    """The cores that a thread may use, and a kernel that lets it choose among them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cores: set[int]) -> None:
        self.now = self.at_first = cores
        self.seen: list[set[int]] = []
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(self.now))
        monkeypatch.setattr(os, "sched_setaffinity", self._set)

    def _set(self, _: int, cores: object) -> None:
        self.now = set(cores)  # type: ignore[call-overload]

    def look(self) -> None:
        self.seen.append(self.now)


@pytest.mark.parametrize("cores", [{0, 1}, {4, 7, 9}, {0, 1, 2, 3}], ids=str)
def test_sides_share_no_core_and_leave_none_out(
    monkeypatch: pytest.MonkeyPatch, cores: set[int]
) -> None:
    kernel = Kernel(monkeypatch, cores)
    for side in range(2):
        apart(kernel.look, side, 2)()
        assert kernel.now == cores
    first, second = kernel.seen
    assert first and second and not first & second
    assert first | second == cores


@pytest.mark.parametrize(("cores", "sides"), [({5}, 2), ({0, 1}, 3), ({0, 1}, 1), (range(64), 2)])
def test_nothing_is_done_where_it_cannot_or_need_not_be(
    monkeypatch: pytest.MonkeyPatch, cores: set[int], sides: int
) -> None:
    kernel = Kernel(monkeypatch, set(cores))
    apart(kernel.look, 0, sides)()
    assert kernel.seen == [set(cores)]


def test_a_failure_gives_the_cores_back(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, {0, 1})

    def fail() -> None:
        assert kernel.now == {1}
        raise ValueError("as work does")

    with pytest.raises(ValueError, match="as work does"):
        apart(fail, 1, 2)()
    assert kernel.now == {0, 1}


def test_a_sandbox_may_forbid_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, {0, 1})

    def forbid(_: int, __: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", forbid)
    apart(kernel.look, 0, 2)()
    assert kernel.seen == [{0, 1}]


def test_the_real_kernel_takes_it_for_this_thread_alone() -> None:
    allowed = os.sched_getaffinity(0)
    seen: list[set[int]] = []
    apart(lambda: seen.append(os.sched_getaffinity(0)), 0, len(allowed))()
    assert len(seen[0]) == (1 if len(allowed) > 1 else len(allowed))
    assert os.sched_getaffinity(0) == allowed
