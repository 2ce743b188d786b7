"""Measures the links of this node to other nodes of its jobs, and compares them with those of the
others.

A few known bytes are fetched over the path that parity takes, now and then, one link after the
other. Measuring what parity's own transfers need would show other things as well: the sender
computes changes while it sends, receivers keep to limits, and streams wait for each other. The
newest measurements go to the control loop, and to daemons that ask, so that each can compare its
own links with others (`holdfast_core.links`). Nothing waits for them but a check that somebody
asked for.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdfast_core.errors import HoldfastError, UnreachableError
from holdfast_core.links import (
    MEMBERS_MIN,
    OTHERS_MIN,
    REFUSED_FACTOR,
    LinkProblem,
    LinkRate,
    LinkVerdict,
    MeasuredLinks,
    peers_to_measure,
    slow_links,
    slow_links_in_words,
)
from holdfast_core.quantities import format_count, format_rate
from holdfast_core.snapshots.membership import Member, Membership
from holdfast_daemon.job.host import JobHost
from holdfast_daemon.logs import bind
from holdfast_daemon.transport.client import BulkClient, BulkStream
from holdfast_daemon.transport.protocol import (
    NO_GENERATION,
    PROBE_BYTES_MAX,
    Kind,
    Request,
    probe_bytes,
)

PERIOD_S = 60.0
"""Time between two rounds of measurements of a job, give or take a tenth."""
FIRST_S = 3.0
"""Time until the first round of an epoch."""
TURN_S = 1.0
PROBES = 2
"""Probes of a link in a round, of which the fastest counts: the first one is slow, because TCP
starts slowly, and any may meet other traffic."""
PROBE_S = 0.3
"""Time for which a probe is read at most: what has come until then shows the rate."""
TIMEOUT_S = 1.0
"""Time within which a peer must accept a connection, and send more bytes."""
PART_BYTES = 256 << 10
FRESH_S = 30.0
"""Age up to which a check uses what was measured, so that nobody can have links measured all the
time."""
CHECKS = 8
"""Times that a check looks for measurements of others, a second apart: other nodes may be about to
measure theirs."""
_DEAD = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}

_log = bind(logging.getLogger(__name__))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Round:
    """Measurements of one job."""

    epoch: int
    at: float
    links: MeasuredLinks


class LinkMonitor:
    """The links of one node, for all its jobs. `run` it as a task.

    Args:
        hosts: the jobs on this node.
        client: for probes alone, because it waits less long than others do.
        fetch: asks the daemon of a member for its measurements of (job, epoch). Blocking; raises a
            HoldfastError.
    """

    def __init__(
        self,
        node: str,
        *,
        hosts: Callable[[], Mapping[str, JobHost]],
        client: BulkClient,
        fetch: Callable[[Member, str, int], MeasuredLinks],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node, self._hosts, self._client = node, hosts, client
        self._fetch, self._clock = fetch, clock
        self._rounds: dict[str, _Round] = {}
        self._due: dict[str, tuple[int, float]] = {}
        """Job → its epoch, and when its links are measured next."""
        self._lock = asyncio.Lock()
        """Held while links are measured: two at a time would share this node's network."""

    def measured(self, job: str, epoch: int) -> MeasuredLinks:
        """The newest measurements of a job in `epoch`; without any, its number is 0."""
        found = self._rounds.get(job)
        return found.links if found is not None and found.epoch == epoch else MeasuredLinks()

    async def run(self) -> None:
        """Measure the links of each job now and then, until cancelled."""
        while True:
            await asyncio.sleep(TURN_S)
            for job, epoch in self._jobs_due():
                try:
                    await self._measure(job)
                except Exception:  # measurements must not end the daemon
                    _log.exception("links_not_measured", job=job)
                period_s = PERIOD_S * random.uniform(0.9, 1.1)
                self._due[job] = (epoch, self._clock() + period_s)

    def _jobs_due(self) -> list[tuple[str, int]]:
        now, hosts = self._clock(), self._hosts()
        self._due = {job: due for job, due in self._due.items() if job in hosts}
        self._rounds = {job: found for job, found in self._rounds.items() if job in hosts}
        found = []
        for job, host in hosts.items():
            epoch = host.engine.epoch
            known, at = self._due.get(job, (-1, now))
            if known != epoch:
                self._due[job] = (epoch, now + FIRST_S)
            elif at <= now:
                found.append((job, epoch))
        return found

    async def check(self, job: str) -> LinkVerdict:
        """Compare the links of this node with those that others have measured. Takes a few seconds.

        What is slow in one round only says nothing: before the node is named, its links are
        measured again."""
        verdict, suspected = LinkVerdict(), False
        for turn in range(CHECKS):
            if turn:
                await asyncio.sleep(TURN_S)
            verdict = await self._check(job, again=suspected)
            if verdict.failure and not suspected:
                suspected = True
            elif not verdict.not_checked or verdict.is_final:
                return verdict
        return verdict

    async def _check(self, job: str, *, again: bool) -> LinkVerdict:
        host = self._hosts().get(job)
        membership = None if host is None else host.engine.membership
        member = None if membership is None else membership.member_on(self._node)
        if membership is None or member is None:
            return LinkVerdict(not_checked="the job has no member on this node yet")
        if len(membership.members) < MEMBERS_MIN:
            few = format_count(len(membership.members), "node")
            return LinkVerdict(
                not_checked=f"a job of {few} has too few links to compare", is_final=True
            )
        known = self._rounds.get(job)
        old = known is None or self._clock() - known.at > FRESH_S
        if again or old or self.measured(job, membership.epoch).number == 0:
            await self._measure(job)
        own = self.measured(job, membership.epoch).rates
        others = await asyncio.gather(
            *(
                asyncio.to_thread(self._ask, membership.member(peer), membership)
                for peer in peers_to_measure(membership, member)
            )
        )
        return _verdict(membership, member, own, [rate for each in others for rate in each])

    def _ask(self, member: Member, membership: Membership) -> tuple[LinkRate, ...]:
        """What another daemon has measured; nothing if it does not answer."""
        try:
            found = self._fetch(member, membership.job, membership.epoch)
        except HoldfastError:
            return ()
        return tuple(rate for rate in found.rates if membership.has(rate.peer))

    async def _measure(self, job: str) -> None:
        """Measure the links of a job, unless it has too few, or none."""
        async with self._lock:
            host = self._hosts().get(job)
            membership = None if host is None else host.engine.membership
            member = None if membership is None else membership.member_on(self._node)
            if membership is None or member is None or len(membership.members) < MEMBERS_MIN:
                return
            rates = await asyncio.to_thread(measure_links, self._client, membership, member)
            before = self._rounds.get(job)
            number = 1 if before is None else before.links.number + 1
            links = MeasuredLinks(number=number, rates=rates)
            self._rounds[job] = _Round(epoch=membership.epoch, at=self._clock(), links=links)


def _verdict(
    membership: Membership, member: int, own: tuple[LinkRate, ...], others: list[LinkRate]
) -> LinkVerdict:
    elsewhere = [rate for rate in others if member not in (rate.member, rate.peer)]
    if not own:
        return LinkVerdict(not_checked="no other daemon of the job can be asked yet")
    if len(elsewhere) < OTHERS_MIN:
        return LinkVerdict(not_checked="too few links between other nodes have been measured yet")
    nodes = {each.index: each.node for each in membership.members}
    mine = [slow for slow in slow_links([*own, *others], REFUSED_FACTOR) if member in slow.members]
    named = [slow for slow in mine if len(slow.members) == 1]
    single = [slow for slow in mine if len(slow.members) > 1]
    slowest = min(rate.bytes_s for rate in own)
    return LinkVerdict(
        failure=slow_links_in_words(named[0], nodes) if named else "",
        notice="; ".join(slow_links_in_words(slow, nodes) for slow in single),
        found=f"{format_count(len(own), 'link')} reach {format_rate(slowest)} or more",
    )


def measure_links(client: BulkClient, membership: Membership, member: int) -> tuple[LinkRate, ...]:
    """Measure the links of `member`, on whose node this is, one after the other. Blocking."""
    found = []
    for peer in peers_to_measure(membership, member):
        address = membership.member(peer).bulk_address
        request = Request(
            job=membership.job,
            epoch=membership.epoch,
            kind=Kind.PROBE,
            index=0,
            generation=NO_GENERATION,
            offset=0,
            nbytes=PROBE_BYTES_MAX,
        )
        measured = measure_link(client, address, request) if address else None
        if measured is not None:
            bytes_s, problem = measured
            rate = LinkRate(member=member, peer=peer, bytes_s=bytes_s, problem=problem)
            found.append(rate)
    return tuple(found)


def measure_link(
    client: BulkClient, address: str, request: Request
) -> tuple[float, LinkProblem] | None:
    """Bytes per second of the link to the daemon at `address`, or what is wrong with it. None if
    the daemon does not listen yet, or does not answer such a request: that says nothing about the
    link."""
    best = 0.0
    try:
        for _ in range(PROBES):
            with client.open(address, request) as stream:
                best = max(best, _read(stream, request.nbytes))
    except UnreachableError as error:
        cause = error.__cause__
        if isinstance(cause, TimeoutError) or getattr(cause, "errno", None) in _DEAD:
            return (best, LinkProblem.NONE) if best else (0.0, LinkProblem.UNREACHABLE)
        return (best, LinkProblem.NONE) if best else None
    except _WrongBytesError:
        return 0.0, LinkProblem.WRONG_BYTES
    except HoldfastError:
        return None
    return best, LinkProblem.NONE


class _WrongBytesError(Exception):
    """What arrived is not what was sent."""


def _read(stream: BulkStream, nbytes: int) -> float:
    """Bytes per second of a probe, which is read to its end or for `PROBE_S`."""
    expected, part = memoryview(probe_bytes()), memoryview(bytearray(PART_BYTES))
    began, got, took_s = time.perf_counter(), 0, 0.0
    while got < nbytes and took_s < PROBE_S:
        view = part[: min(len(part), nbytes - got)]
        stream.read_into(view)
        took_s = time.perf_counter() - began
        if view != expected[got : got + len(view)]:
            raise _WrongBytesError
        got += len(view)
    return got / max(took_s, 1e-9)
