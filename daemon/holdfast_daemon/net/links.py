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
    CHECKED_LINKS_MIN,
    CHECKED_MEMBERS_MIN,
    MEMBERS_MIN,
    REFUSED_BYTES_S,
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
FEWEST_PROBES, MOST_PROBES = 2, 6
"""Probes of a link in a round, of which the fastest counts: the first one is slow, because TCP
starts slowly, and any may meet other traffic."""
PROBED_S = 0.1
"""Time of all probes of a link after which those suffice that were made. A fast link needs a
fraction of a millisecond for one, and a busy processor lets it wait for longer than that."""
PROBE_S = 0.3
"""Time for which a probe is read at most: what has come until then shows the rate."""
TIMEOUT_S = 1.0
"""Time within which a peer must accept a connection, and send more bytes."""
FRESH_S = 30.0
"""Age up to which a check uses what was measured, so that nobody can have links measured all the
time."""
AGAIN_S = 5.0
"""Time after which a check measures again what was slow, so that one burst of other traffic does
not spoil both rounds."""
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
    """When it began."""
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
        self._checks: dict[str, asyncio.Task[LinkVerdict]] = {}
        """Job → the check that runs: whoever asks meanwhile gets the same answer."""
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
                    await self._measure(job, since=self._clock())
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
        if job not in self._checks:
            task = asyncio.create_task(self._compare_twice(job))
            self._checks[job] = task
            task.add_done_callback(lambda _: self._checks.pop(job))
        return await asyncio.shield(self._checks[job])  # whoever gives up ends it for nobody else

    async def _compare_twice(self, job: str) -> LinkVerdict:
        verdict = LinkVerdict()
        for turn in range(CHECKS):
            if turn:
                await asyncio.sleep(TURN_S)
            verdict = await self._compare(job, since=self._clock() - FRESH_S)
            if not verdict.not_checked or verdict.is_final:
                break
        if not verdict.failure:
            return verdict
        await asyncio.sleep(AGAIN_S)
        return await self._compare(job, since=self._clock())

    async def _compare(self, job: str, *, since: float) -> LinkVerdict:
        """Judge by what this node has measured at `since` or later."""
        host = self._hosts().get(job)
        membership = None if host is None else host.engine.membership
        member = None if membership is None else membership.member_on(self._node)
        if host is None or membership is None or member is None:
            return LinkVerdict(not_checked="the job has no member on this node yet")
        if len(membership.members) < CHECKED_MEMBERS_MIN:
            few = format_count(len(membership.members), "node")
            return LinkVerdict(
                not_checked=f"a job of {few} has too few links to compare", is_final=True
            )
        rebuilds = host.engine.rebuilds
        await self._measure(job, since=since)
        own = self.measured(job, membership.epoch).rates
        others = await asyncio.gather(
            *(
                asyncio.to_thread(self._ask, membership.member(peer), membership)
                for peer in peers_to_measure(membership, member)
            )
        )
        if rebuilds or host.engine.rebuilds:
            return LinkVerdict(not_checked="snapshots are rebuilt here, which fills the links")
        return _verdict(membership, member, own, [rate for each in others for rate in each])

    def _ask(self, member: Member, membership: Membership) -> tuple[LinkRate, ...]:
        """What another daemon has measured; nothing if it does not answer."""
        try:
            found = self._fetch(member, membership.job, membership.epoch)
        except HoldfastError:
            return ()
        return tuple(rate for rate in found.rates if membership.has(rate.peer))

    async def _measure(self, job: str, *, since: float) -> None:
        """Measure the links of a job, unless it has too few, or somebody else has begun to at
        `since` or later."""
        async with self._lock:
            host = self._hosts().get(job)
            membership = None if host is None else host.engine.membership
            member = None if membership is None else membership.member_on(self._node)
            if membership is None or member is None or len(membership.members) < MEMBERS_MIN:
                return
            before, began = self._rounds.get(job), self._clock()
            known = before if before and before.epoch == membership.epoch else None
            if known and known.at >= since and known.links.rates:  # else peers may be here by now
                return
            rates = await asyncio.to_thread(measure_links, self._client, membership, member)
            number = 1 if before is None else before.links.number + 1
            links = MeasuredLinks(number=number, rates=rates)
            self._rounds[job] = _Round(epoch=membership.epoch, at=began, links=links)


def _verdict(
    membership: Membership, member: int, own: tuple[LinkRate, ...], others: list[LinkRate]
) -> LinkVerdict:
    """Judge by `own` measurements, which are new. What others say of this node may be a minute old,
    and from before its daemon listened."""
    elsewhere = [rate for rate in others if member not in (rate.member, rate.peer)]
    if not own:
        return LinkVerdict(not_checked="no other daemon of the job can be asked yet")
    if len({frozenset((rate.member, rate.peer)) for rate in elsewhere}) < CHECKED_LINKS_MIN:
        return LinkVerdict(not_checked="too few links between other nodes have been measured yet")
    nodes = {each.index: each.node for each in membership.members}
    slow = slow_links([*own, *elsewhere], REFUSED_FACTOR)
    mine = [each for each in slow if member in each.members]
    refused = [each for each in mine if len(each.members) == 1 and each.bytes_s < REFUSED_BYTES_S]
    noticed = [each for each in mine if each not in refused]
    slowest = min(rate.bytes_s for rate in own)
    return LinkVerdict(
        failure=slow_links_in_words(refused[0], nodes) if refused else "",
        notice="; ".join(slow_links_in_words(each, nodes) for each in noticed),
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
    best, until = 0.0, time.perf_counter() + PROBED_S
    try:
        for number in range(MOST_PROBES):
            if number >= FEWEST_PROBES and time.perf_counter() > until:
                break
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
        return (best, LinkProblem.NONE) if best else None
    return best, LinkProblem.NONE


class _WrongBytesError(Exception):
    """What arrived is not what was sent."""


def _read(stream: BulkStream, nbytes: int) -> float:
    """Bytes per second of a probe, which is read to its end or for `PROBE_S`. They are compared
    after that, because what a processor does takes longer than a fast link."""
    data, got, took_s = bytearray(nbytes), 0, 0.0
    began = time.perf_counter()
    while got < nbytes and took_s < PROBE_S:
        got += stream.read_some(memoryview(data)[got:])
        took_s = time.perf_counter() - began
    if data[:got] != probe_bytes()[:got]:
        raise _WrongBytesError
    return got / max(took_s, 1e-9)
