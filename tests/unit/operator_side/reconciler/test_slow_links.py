"""Slow links between nodes are reported, and nothing else follows."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console
from virtual_world import WALL, World, make_job, running

from holdfast_cli.commands.show import status_view
from holdfast_cli.commands.story import story_of
from holdfast_core.links import ROUNDS, LinkProblem, LinkRate, MeasuredLinks, peers_to_measure
from holdfast_core.stragglers import IN_WORDS, Cause, StepTimes
from holdfast_core.stragglers import ROUNDS as SLOW_ROUNDS
from holdfast_operator.kube.client.times import ClockPair
from holdfast_operator.kube.job.fleet import _slow_links
from holdfast_operator.kube.job.status import status_of

USUAL = 1e9


def measure(
    world: World, rounds: int, rate: Callable[[int, int], float], *, silent: str = ""
) -> None:
    """Let daemons measure their links for some rounds; `rate` is that of a link, by its ends."""
    for _ in range(rounds):
        number = world.step + 1
        for member in world.membership.members:
            rates = []
            for peer in peers_to_measure(world.membership, member.index):
                bytes_s = rate(*sorted((member.index, peer)))
                problem = LinkProblem.NONE if bytes_s else LinkProblem.UNREACHABLE
                rates.append(LinkRate(member=-1, peer=peer, bytes_s=bytes_s, problem=problem))
            if member.node != silent:
                links = MeasuredLinks(number=number, rates=tuple(rates))
                world.figures_of = {**world.figures_of, member.node: {"links": links}}
        world.train(world.step + 1)
        world.look()


def slow_node(node: int, bytes_s: float = 1e6) -> Callable[[int, int], float]:
    return lambda one, other: bytes_s if node in (one, other) else USUAL


def test_a_node_with_slow_links_is_reported_once_and_not_blamed_or_moved() -> None:
    world = running(make_job())
    measure(world, ROUNDS - 1, slow_node(2))
    assert world.messages("SlowLinks") == []
    measure(world, 3, slow_node(2))
    assert world.messages("SlowLinks") == [
        "links of n2 to n0, n1, n3 reach 1.0 MB/s at most, those of other nodes 1.0 GB/s"
    ]
    assert world.membership.epoch == 1 and world.record == {}
    measure(world, ROUNDS, slow_node(9))
    assert world.messages("SlowLinksPassed") == ["links of n2: as fast as others again"]
    assert world.state.links.slow == ()


def test_a_single_slow_link_is_reported_and_names_neither_end() -> None:
    world = running(make_job())
    measure(world, ROUNDS + 1, lambda one, other: 0.0 if (one, other) == (0, 1) else USUAL)
    assert world.messages("SlowLinks") == [
        "the link between n0 and n1: unreachable; either may be the cause"
    ]
    measure(world, ROUNDS, slow_node(9))
    assert world.messages("SlowLinksPassed") == [
        "the link between n0 and n1: as fast as others again"
    ]


def test_a_round_in_which_a_daemon_has_measured_nothing_is_none() -> None:
    world = running(make_job())
    measure(world, 9 * ROUNDS, slow_node(2), silent="n1")
    assert world.messages("SlowLinks") == []


def test_what_is_not_to_be_judged_is_not_judged() -> None:
    world = running(make_job(onStraggler="Ignore"))
    measure(world, 9 * ROUNDS, slow_node(2))
    assert world.messages("SlowLinks") == []


def step_times(world: World, number: int, *, wait_s: float, slow: int = -1) -> None:
    """A window of each rank, in which all wait for a network, and for the `slow` one as well."""
    world.times = {
        rank: StepTimes(
            window=number,
            steps=10,
            step_s=0.13 + wait_s if slow >= 0 else 0.1 + wait_s,
            own_s=0.13 if rank == slow else 0.1,
            wait_s=wait_s + (0.03 if slow >= 0 and rank != slow else 0.0),
        )
        for rank in range(world.job.world_size)
    }


def test_ranks_that_all_wait_prove_nothing_about_the_links() -> None:
    """In a healthy job all ranks may wait as long: for experts whose loads move about, or for each
    other's last gradients."""
    world = running(make_job())
    step_times(world, 1, wait_s=0.1)
    measure(world, ROUNDS, slow_node(2))
    text = "links of n2 to n0, n1, n3 reach 1.0 MB/s at most, those of other nodes 1.0 GB/s"
    assert world.messages("SlowLinks") == [text]
    assert status(world)["slowLinks"] == [{"node": "n2", "text": text}]


@pytest.mark.parametrize(
    ("narrow", "cause"), [(2, Cause.NETWORK), (1, Cause.UNKNOWN)], ids=["its node", "another one"]
)
def test_that_links_of_its_node_are_slow_is_said_of_a_rank_whose_times_show_no_cause(
    narrow: int, cause: Cause
) -> None:
    world = running(make_job())
    for number in range(1, SLOW_ROUNDS + 1):
        step_times(world, number, wait_s=0.1, slow=2)
        measure(world, 1, slow_node(narrow))
    (slow,) = status(world)["stragglers"]
    assert (slow["rank"], slow["cause"]) == (2, cause)
    (text,) = world.messages("Straggler")
    assert text == slow["text"] and text.endswith(IN_WORDS[cause])
    assert "the cause is not known" in text, "slow links and a slow rank may be a coincidence"


def test_slow_links_are_in_the_status_and_shown() -> None:
    world = running(make_job())
    measure(world, ROUNDS - 1, slow_node(2))
    assert "slowLinks" not in status(world)
    measure(world, 1, slow_node(2))
    found = status(world)
    text = "links of n2 to n0, n1, n3 reach 1.0 MB/s at most, those of other nodes 1.0 GB/s"
    assert found["slowLinks"] == [{"node": "n2", "text": text}] and _slow_links(found) == 1
    console = Console(file=io.StringIO(), width=200)
    console.print(status_view("llm", found, ()))
    assert f"SLOW: {text}" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "those of other nodes 1.0 GB/s" in " ".join(story_of("llm", found, ()).split())


def status(world: World) -> dict[str, Any]:
    return status_of(
        world.job,
        world.observed(),
        world.decision,
        previous={},
        clocks=ClockPair(now=0.0, wall=WALL),
        now=world.now,
        pods={},
        recoveries=[],
    )
