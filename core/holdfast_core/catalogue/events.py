"""Events of jobs on nodes, by the names that logs and the catalogue use."""

from __future__ import annotations

from enum import StrEnum


class JobEvent(StrEnum):
    """Event of a job on a node, by its name in logs and in the catalogue."""

    EPOCH_BEGAN = "epoch_began"
    JOB_ENDED = "job_ended"
    """The daemon has freed all that it held of the job."""
    TOKENS_LOST = "tokens_lost"
    """A recovery returned experts to older versions; the event has the key `loss`."""
    MEMBERSHIP_FOR_OTHER_MEMORY = "membership_for_other_memory"
    """A membership names this node with the identity of another memory; it is ignored."""
    FENCED = "fenced"
    """A peer is in a newer epoch."""
    LINE = "line"
    """The recovery line is decided."""

    SESSION_OPENED = "session_opened"
    """A trainer's session; the event has the key `stayed` if its process is of an earlier epoch."""
    WENT_LIVE = "went_live"
    """The first rank of the node continues from the state that its processes have; nothing is
    restored."""
    RANK_LOST = "rank_lost"
    """A session broke off in its epoch."""
    INSPECTED = "inspected"
    """The launcher has inspected the process of a rank, because the job hangs; `detail` has its
    state and its stack."""
    SKIPPED = "skipped"
    """A save found no free slot."""
    COMMITTED = "committed"
    SEAL_FAILED = "seal_failed"
    PROTECTED = "protected"
    """A generation is protected job-wide."""
    DEAD = "dead"
    """Some rank will never complete the generation."""

    ARENA_REFUSED = "arena_refused"
    """Memory for an arena could not be allocated."""
    ARENA_OVERGROWN = "arena_overgrown"
    """A trainer took memory beyond its arena; the excess was cut off."""
    CUT_BACK_FAILED = "cut_back_failed"

    PARITY_BUILT = "parity_built"
    PARITY_FAILED = "parity_failed"
    CORRUPT = "corrupt"
    """A snapshot here does not match its manifest."""
    CORRUPT_PARITY = "corrupt_parity"
    SUSPECT = "suspect"
    """Bytes that came from a peer do not match its manifest."""

    REBUILD_STARTED = "rebuild_started"
    REBUILT = "rebuilt"
    REBUILD_FAILED = "rebuild_failed"

    STORAGE_CHOICE = "storage_choice"
    """The leader chose the copy to load."""
    STORAGE_UNREACHABLE = "storage_unreachable"
    LOAD_STARTED = "load_started"
    LOADED = "loaded"
    LOAD_FAILED = "load_failed"

    PERSIST_ORDERED = "persist_ordered"
    PERSIST_FAILED = "persist_failed"
    """A rank of this node could not be written."""
    PERSISTED = "persisted"
    """A set in the durable tier is complete."""
    PERSIST_GIVEN_UP = "persist_given_up"
    PERSIST_CLEANUP_FAILED = "persist_cleanup_failed"
