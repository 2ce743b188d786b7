"""The link to the daemon: a session that is opened, may be lost, and is then opened again.

The link holds the claim on the arena, and the thread that watches for events. A daemon that has
restarted has no sessions. The first sign of that marks the session as lost, and the next save opens
another one. After a failed attempt, saves are skipped for a pause, which doubles each time. The old
claim is released before a new one is made, because the kernel refuses a second claim.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from holdfast._copying.arena import MappedArena
from holdfast._copying.devices import Device
from holdfast._copying.placed import Placed
from holdfast._daemon.client import (
    AbortRequest,
    CommitRequest,
    DaemonClient,
    DaemonEvent,
    GrantRequest,
    OpenRequest,
    ParityGroup,
    TrainedRequest,
    TrainerReport,
)
from holdfast._settings import Settings
from holdfast_core.corruption import Divergence
from holdfast_core.errors import (
    HoldfastError,
    SnapshotSkippedError,
    UnknownSessionError,
    UnreachableError,
)
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import Layout, encode_layout

_log = logging.getLogger("holdfast")


class Link:
    """The session of one rank with its daemon. The saver's thread uses it, except where a docstring
    names another thread."""

    def __init__(
        self,
        client: DaemonClient,
        device: Device,
        settings: Settings,
        on_event: Callable[[DaemonEvent], None],
    ) -> None:
        self._client = client
        self._device = device
        self._settings = settings
        self._on_event = on_event
        self.epoch: int | None = None
        """Membership epoch; None before `restore` or the first open."""
        self.layout: Layout | None = None
        self.session = ""
        self.slots = 0
        """Number of slots in the arena of the newest session."""
        self.earlier: Divergence | None = None
        """What this rank reported in an earlier epoch of a divergence in which no rank was
        named."""
        self._arena: MappedArena | None = None
        self._granted: int | None = None
        """Step of the snapshot for which a slot may be granted that is neither sealed nor given
        back; None for no slot."""
        self._lost = False
        self._pause_s = 0.0
        self._retry_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether there is a session that is not known to be lost. Any thread may ask."""
        return self._arena is not None and not self._lost

    def parity_group(self) -> ParityGroup | None:
        """Ask the daemon for the ranks that protect this one; None without redundancy, or if the
        daemon is in another epoch. Raises HoldfastError."""
        hello = self._client.hello()
        return hello.parity_group if self.epoch in (None, hello.epoch) else None

    @property
    def mirror(self) -> Placed | None:
        """The mirror behind the slots of the arena, as one slot; None if it has none."""
        arena, layout = self._arena, self.layout
        if arena is None or layout is None or not layout.mirror:
            return None
        start, nbytes = self.slots * layout.slot_bytes, layout.mirror_bytes
        if start + nbytes > arena.nbytes:
            return None  # the daemon is too old for mirrors
        inside = replace(
            layout, entries=(), casts=(), mirror=(), extras_offset=nbytes, extras_capacity=0
        )
        view, address = arena.view(start, nbytes), arena.address + start
        return Placed(arena=view, address=address, layout=inside, slot=0)

    def open(self, layout: Layout, largest_slot_bytes: int) -> None:
        """Open a session with `layout`, unless one is open. A session that was lost, or has another
        layout, is closed first.

        Raises:
            SnapshotSkippedError: the pause after a failed attempt is not over.
            HoldfastError: the daemon refused, or did not answer.
        """
        if self.is_open and layout == self.layout:
            return
        self.end()
        now = time.monotonic()
        if now < self._retry_s:
            raise SnapshotSkippedError("the daemon is lost; the session will be opened again soon")
        try:
            self._open(layout, largest_slot_bytes)
        except HoldfastError:
            low, high = self._settings.reopen_backoff_s, self._settings.reopen_backoff_max_s
            self._pause_s = min(max(2 * self._pause_s, low), high)
            self._retry_s = time.monotonic() + self._pause_s
            raise
        self._pause_s = self._retry_s = 0.0

    def _open(self, layout: Layout, largest_slot_bytes: int) -> None:
        # Open the session, and map its arena.
        settings, client = self._settings, self._client
        if self.epoch is None:
            self.epoch = client.hello().epoch
        request = OpenRequest(
            epoch=self.epoch, layout=encode_layout(layout), largest_slot_bytes=largest_slot_bytes
        )
        opened = client.open(request, settings.open_timeout_s)
        arena = client.claim(opened.token, opened.arena_bytes, settings.rpc_timeout_s)
        self.layout, self.session, self._arena, self._lost = layout, opened.session, arena, False
        self.slots, self.earlier = opened.slots, opened.earlier
        # Check that the layout fits the arena, and let the device copy into it.
        try:
            Placed(arena=arena.view(0, arena.nbytes), address=arena.address, layout=layout, slot=0)
            self._device.register(arena.address, arena.nbytes)
        except Exception:
            self._release()
            raise
        # Watch for events of this session.
        threading.Thread(
            target=self._watch, args=(opened.session,), name="holdfast-watch", daemon=True
        ).start()
        _log.info("session opened: %d bytes in each slot", layout.slot_bytes)

    def grant(
        self,
        step: int,
        base: Generation | None = None,
        unchanged: bytes = b"",
        *,
        first_step: int = 0,
    ) -> tuple[Placed, bool]:
        """Request a slot for the snapshot of `step`.

        From this call on the slot counts as granted, whatever fails, until `commit` has sealed it
        or `give_back` was called.

        Args:
            base: committed snapshot from which to carry over the `unchanged` pieces.
            unchanged: bit map of the pieces to carry over.
            first_step: first step of the window that ends with `step`; 0 if the snapshot captures
                one step.

        Returns:
            Where to write, and whether the unchanged pieces are carried over.

        Raises:
            SnapshotSkippedError: there is no free slot now.
        """
        self._granted = step  # before the call, whose answer may be lost
        request = GrantRequest(
            session=self.session,
            epoch=self.epoch or 0,
            step=step,
            base=base,
            unchanged=unchanged,
            first_step=first_step,
        )
        grant = self._client.grant(request)
        if grant.slot < 0:
            self._granted = None
            raise SnapshotSkippedError(f"no slot: {grant.skipped}")
        arena = self._arena
        assert arena is not None and self.layout is not None
        placed = Placed(
            arena=arena.view(0, arena.nbytes),
            address=arena.address,
            layout=self.layout,
            slot=grant.slot,
            places=grant.places,
        )
        return placed, grant.carried

    def commit(self, request: CommitRequest, nan_units: tuple[str, ...]) -> None:
        """Seal the snapshot. Raises the error that the daemon answers."""
        self._client.commit(replace(request, nan_units=nan_units))
        self._granted = None

    def give_back(self, reason: str) -> None:
        """Give back the granted slot, if there is one. Raises nothing: if the call fails, the
        daemon takes the slot back with the next grant, or with the end of the session."""
        step, self._granted = self._granted, None
        if step is None or self._lost:
            return
        try:
            epoch = self.epoch or 0
            request = AbortRequest(session=self.session, epoch=epoch, step=step, reason=reason)
            self._client.abort(request)
        except HoldfastError as error:
            self.note_lost_session(error)
        except Exception:
            _log.debug("the slot of step %d could not be given back", step, exc_info=True)

    def note_lost_session(self, error: HoldfastError) -> None:
        """Mark the session as lost, if that is what `error` means."""
        if isinstance(error, UnknownSessionError | UnreachableError):
            self._lost = True

    def report_without_session(self, report: TrainerReport, *, closed: bool = False) -> None:
        """Report progress while there is no session.

        Args:
            closed: whether this rank has stopped training.

        Raises:
            SnapshotSkippedError: the pause after a failed attempt is not over.
            HoldfastError: the daemon refused, or did not answer.
        """
        if self.epoch is None:
            if time.monotonic() < self._retry_s:
                raise SnapshotSkippedError("the daemon is lost; it will be called again soon")
            self.epoch = self._client.hello().epoch
        self._client.report_without_session(
            TrainedRequest.of(report, epoch=self.epoch, closed=closed)
        )

    def end(self) -> None:
        """Close the session and release the claim.

        A session that counts as lost is closed, too: if only an answer was lost, the daemon still
        has the session, and would take the end of the claim for the end of this rank.
        """
        if self._arena is not None:
            try:
                self._client.close_session(self.session)
            except HoldfastError as error:
                _log.info("the session could not be closed: %s", error)
        self._release()

    def _release(self) -> None:
        arena, self._arena, self._granted = self._arena, None, None
        if arena is not None:
            self._device.unregister()
            arena.close()

    def _watch(self, session: str) -> None:
        try:
            for event in self._client.watch(session):
                self._on_event(event)
        except HoldfastError as error:
            _log.debug("the watch of session %s ended: %s", session, error)
        if session == self.session:
            self._lost = True
