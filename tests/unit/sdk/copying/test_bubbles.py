"""When the blocks of a capture are handed out: into bubbles, beside the computation, or at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from holdfast._copying.bubbles import STEPS_KEPT, Bubbles, Feed, PieceBlock
from holdfast._copying.engine import BLOCK_PIECES

PIECE = 64
BLOCK = BLOCK_PIECES * PIECE
HUNG_S = 30.0


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def blocks_of(count: int) -> list[PieceBlock]:
    return [PieceBlock(BLOCK_PIECES * index, BLOCK) for index in range(count)]


def copied(bubbles: Bubbles, clock: Clock, count: int, block_s: float) -> list[int | None]:
    """A capture on one thread, each of its blocks copied in `block_s`."""
    feed = bubbles.feed(blocks_of(count))
    order: list[int | None] = []
    while (first := feed()) is not None:
        order.append(first)
        clock.now += block_s
    return order


def experienced(clock: Clock, *, bubble_s: float, step_s: float = 100.0) -> Bubbles:
    """After a step with one bubble, and a capture of one second a block."""
    bubbles = Bubbles(2, clock)
    clock.now += step_s
    bubbles.begin()
    assert copied(bubbles, clock, 4, 1.0) == [0, 16, 32, 48], "nothing is known: all at once"
    with bubbles.bubble():
        clock.now += bubble_s
    clock.now = step_s * 2
    bubbles.end()
    return bubbles


def following(clock: Clock, bubbles: Bubbles, count: int = 6) -> Feed:
    """The capture of the next step."""
    bubbles.begin()
    return bubbles.feed(blocks_of(count))


def test_what_fits_into_a_bubble_is_kept_for_it_and_the_rest_is_copied_beside_the_computation() -> (
    None
):
    clock = Clock()
    bubbles = experienced(clock, bubble_s=2.5)
    feed = following(clock, bubbles)
    assert feed.schedule.bubble_bytes // BLOCK == 2, "of a second each"
    assert [feed() for _ in range(4)] == [32, 48, 64, 80]
    with bubbles.bubble():
        assert [feed(), feed(), feed()] == [0, 16, None]


def test_nothing_is_kept_for_many_bubbles_each_too_short_for_a_block() -> None:
    clock = Clock()
    bubbles = experienced(clock, bubble_s=9.0)
    for _ in range(STEPS_KEPT):
        bubbles.begin()
        for bubble_s in (*[0.75] * 100, 1.5):
            with bubbles.bubble():
                clock.now += bubble_s
        bubbles.end()
    assert bubbles.schedule(100 * BLOCK).bubble_bytes == BLOCK * 3 // 2, "of a second a block"


def test_a_bubble_within_a_bubble_counts_once() -> None:
    clock = Clock()
    bubbles = experienced(clock, bubble_s=9.0)
    feed = following(clock, bubbles)
    with bubbles.bubble():
        with bubbles.bubble():
            clock.now += 1.0
        assert [feed() for _ in range(2)] == [0, 16], "the outer one is still open"
        clock.now += 1.0
    bubbles.end()
    assert list(bubbles._steps) == [[9.0], [2.0]]


def test_a_thread_waits_for_the_bubble_that_is_to_come() -> None:
    clock = Clock()
    bubbles = experienced(clock, bubble_s=9.0)
    feed = following(clock, bubbles, 1)
    got: list[int | None] = []
    thread = threading.Thread(target=lambda: got.append(feed()))
    thread.start()
    assert thread.is_alive() and not got
    with bubbles.bubble():
        thread.join(HUNG_S)
    assert got == [0]


def test_what_is_left_is_copied_at_once_when_training_needs_its_tensors() -> None:
    clock = Clock()
    bubbles = experienced(clock, bubble_s=9.0)
    feed = following(clock, bubbles, 3)
    bubbles.end()
    assert [feed() for _ in range(4)] == [0, 16, 32, None]


def test_bubbles_that_do_not_come_are_given_up_after_a_step() -> None:
    clock = Clock()
    bubbles = experienced(clock, bubble_s=9.0, step_s=10.0)
    feed = following(clock, bubbles, 2)
    clock.now += 10.0
    assert [feed(), feed(), feed()] == [0, 16, None]


def test_the_wait_for_a_bubble_does_not_count_as_copying() -> None:
    clock = Clock()
    bubbles = experienced(clock, bubble_s=9.0)
    assert bubbles.waited_s == 0.0
    feed = following(clock, bubbles, 2)
    clock.now += 50.0
    with bubbles.bubble():
        while feed() is not None:
            clock.now += 1.0
    assert bubbles.waited_s == 50.0
    assert bubbles.schedule(100 * BLOCK).bubble_bytes == 9 * BLOCK, "still a block a second"


def test_threads_that_copy_at_the_same_time_count_once() -> None:
    clock = Clock()
    bubbles = Bubbles(2, clock)
    bubbles.begin()
    feed = bubbles.feed(blocks_of(2))
    assert feed() == 0
    with ThreadPoolExecutor(1) as other:
        assert other.submit(feed).result(HUNG_S) == 16
        clock.now += 1.0
        assert other.submit(feed).result(HUNG_S) is None
    clock.now += 1.0
    assert feed() is None
    with bubbles.bubble():
        clock.now += 3.0
    bubbles.end()
    assert (bubbles.waited_s, bubbles.schedule(9 * BLOCK).bubble_bytes) == (0.0, 3 * BLOCK)


def test_a_loop_that_never_marks_a_change_of_tensors_keeps_nothing_for_bubbles() -> None:
    clock = Clock()
    bubbles = Bubbles(2, clock)
    for _ in range(3):
        clock.now += 100.0
        bubbles.begin()
        assert copied(bubbles, clock, 3, 1.0) == [0, 16, 32]
        with bubbles.bubble():
            clock.now += 50.0


@given(st.lists(st.integers(0, BLOCK), max_size=20), st.floats(0, 30))
def test_every_block_is_handed_out_once(sizes: list[int], bubble_s: float) -> None:
    clock = Clock()
    bubbles = experienced(clock, bubble_s=bubble_s)
    bubbles.begin()
    feed = bubbles.feed([PieceBlock(index, nbytes) for index, nbytes in enumerate(sizes)])
    kept = feed.schedule.bubble_bytes
    free = [feed() or 0 for _ in range(len(sizes) - len(feed._kept))]
    bubbles.end()
    rest = list(iter(feed, None))
    assert sorted([*free, *rest]) == list(range(len(sizes)))
    assert sum(sizes[index] for index in rest) <= kept
