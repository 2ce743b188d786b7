"""The members of a parity group as a source of manifests and bytes, within one epoch.

Builds and rebuilds fetch through it, with the epoch that the work belongs to: a peer in a newer
epoch refuses, and the work stops once its own daemon has entered a newer epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from holdfast_core.errors import HoldfastError, UnreachableError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import decode_manifest, layout_id, manifest_digest
from holdfast_core.snapshots.membership import Member
from holdfast_daemon.engine.effects import PeerSnapshot
from holdfast_daemon.epoch_scope import EpochScope
from holdfast_daemon.memory.job_bytes import JobBytes
from holdfast_daemon.parity.combining import Stream
from holdfast_daemon.transport.protocol import Kind, Request


class PeerClient(Protocol):
    """Small requests to other daemons. Called from several threads at once."""

    def fetch_manifest(
        self, member: Member, job: str, epoch: int, rank: int, generation: Generation
    ) -> tuple[bytes, bytes]:
        """(manifest, layout), encoded, of a snapshot that the daemon holds or keeps; both are empty
        when it has neither. Raises HoldfastError."""


class BulkOpener(Protocol):
    """Bulk bytes of other daemons: `transport.client.BulkClient`."""

    def open(self, address: str, request: Request) -> Stream:
        """Open a stream of the requested bytes. Raises HoldfastError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFetch:
    """`combining.Fetch` and `changes.ChangeFetch` over the bulk services of a parity group."""

    bulk: BulkOpener
    job: str
    epoch: int
    generation: Generation
    sources: Mapping[int, PeerSnapshot]
    """Snapshots to read, by position."""
    owners: Mapping[int, Member] = field(default_factory=dict)
    """Owners of parity blocks, by position in the group."""
    parity_lanes: Sequence[int] = ()
    """Parity lanes, by row of the group's code."""

    def open_change(
        self, position: int, base: Generation, offset: int, nbytes: int, piece_bytes: int
    ) -> Stream:
        source = self.sources[position]
        request = Request(
            job=self.job,
            epoch=self.epoch,
            kind=Kind.CHANGE,
            index=source.rank,
            generation=self.generation,
            offset=offset,
            nbytes=nbytes,
            base=base,
            piece_bytes=piece_bytes,
        )
        return self.bulk.open(source.member.bulk_address, request)

    def open(self, position: int, kind: Kind, offset: int, nbytes: int, row: int = 0) -> Stream:
        if kind is Kind.SNAPSHOT:
            source = self.sources[position]
            index, member = source.rank, source.member
        else:
            index, member = self.parity_lanes[row], self.owners[position]
        request = Request(
            job=self.job,
            epoch=self.epoch,
            kind=kind,
            index=index,
            generation=self.generation,
            offset=offset,
            nbytes=nbytes,
        )
        return self.bulk.open(member.bulk_address, request)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Asks the members of a parity group for manifests and bytes of one job."""

    storage: JobBytes
    """This node's storage: manifests and layouts kept in it need not be fetched."""
    bulk: BulkOpener
    peers: PeerClient

    def describe(
        self, sources: Iterable[PeerSnapshot], generation: Generation, scope: EpochScope
    ) -> dict[int, tuple[bytes, bytes]]:
        """(manifest, layout) of each source, by position: kept here, or else fetched from it."""
        return {
            source.position: self.find(
                (source.member,), source.rank, generation, source.manifest_digest, scope
            )
            for source in sources
        }

    def find(
        self,
        members: Iterable[Member],
        rank: int,
        generation: Generation,
        digest: int,
        scope: EpochScope,
    ) -> tuple[bytes, bytes]:
        """(manifest, layout) kept here, or else from the first of `members` that has exactly the
        requested ones. An heir that is the last member of its group has them here.

        Raises:
            UnreachableError: no member has them; the message gives the reason of each.
            StaleEpochError: a newer epoch has begun.
        """
        description = self.storage.describe(rank, generation)
        if description is not None and not _flaw(*description, digest):
            return description
        membership = scope.current()
        why = []
        for member in members:
            scope.check()
            try:
                manifest, layout = self.peers.fetch_manifest(
                    member, membership.job, membership.epoch, rank, generation
                )
                flaw = _flaw(manifest, layout, digest)
                if not flaw:
                    return manifest, layout
                why.append(f"{member.node} {flaw}")
            except HoldfastError as error:
                why.append(f"{member.node}: {error}")
        raise UnreachableError(
            f"no manifest of rank {rank} generation {generation}: {'; '.join(why) or 'no peer'}"
        )

    def fetch_from(
        self,
        sources: Iterable[PeerSnapshot],
        scope: EpochScope,
        generation: Generation,
        *,
        lane: int = 0,
        owners: Mapping[int, Member] | None = None,
        rows: int = 0,
    ) -> GroupFetch:
        """The bytes of `sources`, and of the parity blocks of `lane` in `rows` of the group's code,
        which `owners` hold, by position."""
        membership = scope.current()
        return GroupFetch(
            bulk=self.bulk,
            job=membership.job,
            epoch=membership.epoch,
            generation=generation,
            sources={source.position: source for source in sources},
            owners=owners or {},
            parity_lanes=[membership.parity_lane(lane, row) for row in range(rows)],
        )


def _flaw(manifest: bytes, layout: bytes, digest: int) -> str:
    """Why these are not the manifest of `digest` and its layout; empty when they are."""
    if not manifest:
        return "does not have it"
    if manifest_digest(manifest) != digest:
        return "has a different one"
    if layout_id(layout) != decode_manifest(manifest).layout_id:
        return "has a different layout"
    return ""
