"""Plant bugs in a copy of the sources and check that the simulation finds them: `make mutants`.
Those in the seats of experts, and in the control loop, are for tests to find: the simulation has
daemons, and neither tensors nor an operator.

A simulation that finds nothing may be blind. Each mutant breaks one rule of the protocol; a mutant
that survives shows a hole in the simulation, or a rule that another rule already enforces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("core", "host", "protos", "storage", "daemon", "operator", "trainer_sdk")
SIMULATION = Path(__file__).resolve().parent
UNIT_HELPERS = ROOT / "tests" / "unit" / "sdk" / "helpers"
DAEMON = "daemon/holdfast_daemon"
ENGINE = f"{DAEMON}/engine"
MOE = "trainer_sdk/holdfast/_moe"
RECONCILER = "operator/holdfast_operator/reconciler"
KUBE = "operator/holdfast_operator/kube"
CAPTURE = "trainer_sdk/holdfast/_capture"
ELASTIC = "trainer_sdk/holdfast/_elastic"
RESTORING = "trainer_sdk/holdfast/_restoring"
SAVE = "trainer_sdk/holdfast/_save"
STATE = "trainer_sdk/holdfast/_state"
FAILOVERS = "operator_side/reconciler/test_failing_over.py"
SCHEDULES = 1500
STAGE_SCHEDULES = 160
RESHAPING_SCHEDULES = 40
TIME_LIMIT_S = 1800
"""Far more than all schedules take: an engine that never returns is broken, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One planted bug."""

    name: str
    edits: tuple[tuple[str, str, str], ...]
    """(file, text, text that replaces it)."""
    tier: bool = False
    """Whether all schedules have a durable tier, because the bug is in persisting."""
    worlds: bool = False
    """Whether members leave and come in all schedules, because the bug is in that."""
    votes: bool = False
    """Whether the model of votes is to find it (`voting`), and not the simulation of daemons."""
    stages: bool = False
    """Whether the model of stages is to find it (`staging`), and not the simulation of daemons."""
    reshapes: bool = False
    """Whether the model of worlds of other sizes is to find it (`reshaping`)."""
    test: str = ""
    """Test below tests/unit that is to find it, and not the simulation."""
    plays: str = ""
    """Test of `test_stages.py` that is to find it, because few seeds would."""
    enforced_by: str = ""
    """What else enforces the rule, so that the simulation cannot find the bug."""


MUTANTS = (
    Mutant(
        name="free the old generation when the new one is complete, not when it is protected",
        edits=(
            (
                f"{ENGINE}/leader.py",
                "    retained = _newest([], protected, previous.retained)\n",
                "    complete = [g for g in current "
                "if recovery.is_complete(membership, holdings, g)]\n"
                "    retained = _newest(complete, protected, previous.retained)\n",
            ),
        ),
    ),
    Mutant(
        name="decide the line before every daemon has verified what it holds",
        edits=((f"{ENGINE}/leader.py", "not reports[m].verified for m", "False for m"),),
    ),
    Mutant(
        # Either rule alone brings all owners to one generation.
        name="protect the newest generation first, and give up no younger block for an older one",
        edits=(
            (
                f"{ENGINE}/upkeep.py",
                "return min((g for g in wanted",
                "return max((g for g in wanted",
            ),
            (f"{ENGINE}/upkeep.py", "if generation > wanted or not", "if not"),
        ),
    ),
    Mutant(
        name="call a generation protected without the parity of one member",
        edits=(
            (
                "core/holdfast_core/protection/recovery.py",
                "_has_all_blocks(membership, holdings, group, group, generation)",
                "_has_all_blocks(membership, holdings, group, group[1:], generation)",
            ),
        ),
    ),
    Mutant(
        name="count what was adopted as verified",
        enforced_by="verification goes on, and who reads a snapshot verifies each of its pieces",
        edits=(
            (
                f"{ENGINE}/state.py",
                "if slot.state is SlotState.SEALED and slot.verified and",
                "if slot.state is SlotState.SEALED and",
            ),
            (
                f"{ENGINE}/state.py",
                "if slot.state is SlotState.SEALED and not slot.verified:",
                "if False:",
            ),
            (
                f"{ENGINE}/answers.py",
                "if snapshot is None or not snapshot[1].verified:",
                "if snapshot is None:",
            ),
        ),
    ),
    Mutant(
        name="forget what was announced, and trust reports that are not verified",
        edits=(
            (
                f"{ENGINE}/leader.py",
                "for member, r in reports.items() if r.verified}",
                "for member, r in reports.items()}",
            ),
            (
                f"{ENGINE}/job.py",
                "leader.with_announced(membership, memory.current.directive, line, retained)",
                "leader.with_announced(membership, memory.current.directive, line, None)",
            ),
        ),
    ),
    Mutant(
        name="keep nothing beside the line when an epoch begins",
        edits=(
            (
                f"{ENGINE}/leader.py",
                "            protected=recovery.newest_protected"
                "(membership, holdings, not_after=until),\n",
                "",
            ),
            (
                f"{ENGINE}/leader.py",
                "            retained=recovery.newest_survivable"
                "(membership, holdings, not_after=until)\n"
                "            or recovery.most_survivable"
                "(membership, holdings, not_after=until),\n",
                "",
            ),
        ),
    ),
    Mutant(
        name="accept a generation of a rolled-back epoch beside those of the present one",
        edits=(
            (
                f"{ENGINE}/leader.py",
                "if generation.epoch == membership.epoch or generation == line.generation",
                "if True",
            ),
            (f"{ENGINE}/upkeep.py", "if generation.epoch < directive.epoch:", "if False:"),
        ),
    ),
    Mutant(
        name="give slots away that a trainer may still be writing into",
        edits=(
            (
                f"{ENGINE}/state.py",
                "        for _, slot in self.slots():\n            slot.verified",
                "        for _, slot in self.slots():\n"
                "            if slot.state is SlotState.GRANTED:\n"
                "                slot.clear()\n"
                "            slot.verified",
            ),
        ),
    ),
    Mutant(
        name="grant the slot of the recovery line before the next generation is protected",
        edits=(
            (
                f"{ENGINE}/upkeep.py",
                "            if sealed and not _is_kept(epoch, slot.generation) and "
                "_is_spare(memory, epoch, slot):\n",
                "            if sealed and slot.generation == epoch.retained:\n",
            ),
        ),
    ),
    Mutant(
        name="make room in the older block, also where its generation must be kept",
        edits=(
            (
                f"{ENGINE}/upkeep.py",
                "if generation is None or generation == epoch.retained:",
                "if generation is None:",
            ),
            (
                f"{ENGINE}/upkeep.py",
                "if generation > wanted or not",
                "if generation < wanted or not",
            ),
        ),
    ),
    Mutant(
        name="write a sparse window to storage",
        edits=(
            (
                "core/holdfast_core/protection/recovery.py",
                "return any(e.window for",
                "return any(False for",
            ),
            (
                f"{DAEMON}/engine/persisting.py",
                "    if slot.manifest.first_step:\n",
                "    if False:\n",
            ),
        ),
    ),
    Mutant(
        name="build in the other block than in the free one",
        edits=(
            (
                f"{DAEMON}/job/worker.py",
                "                block,\n                older.view,\n",
                "                older.view,\n                older.view,\n",
            ),
        ),
    ),
    Mutant(
        name="update a block without looking whether it is whole",
        edits=(
            (
                f"{DAEMON}/parity/update.py",
                "bad = first_bad_piece("
                "part[: len(older_part)], digests, size, first_piece=at // size)",
                "bad = None",
            ),
        ),
    ),
    Mutant(
        name="send the change of pieces without looking whether they are whole",
        edits=((f"{DAEMON}/parity/changes.py", "    if bad is not None:\n", "    if False:\n"),),
    ),
    Mutant(
        name="take a change as it arrives",
        edits=(
            (
                f"{DAEMON}/parity/changes.py",
                'if xxh3_64_intdigest(part) != int.from_bytes(digest, "little"):',
                "if False:",
            ),
        ),
    ),
    Mutant(
        name="apply a change again from its beginning when its stream breaks",
        edits=(
            (
                f"{DAEMON}/parity/update.py",
                "                    stream.read_into(scratch[:nbytes])\n",
                "                    try:\n"
                "                        stream.read_into(scratch[:nbytes])\n"
                "                    except Exception:\n"
                "                        self.bring(made, range(first, end))\n"
                "                        break\n",
            ),
        ),
    ),
    Mutant(
        name="take a change for complete when its stream breaks before the last piece",
        edits=(
            (
                f"{DAEMON}/parity/update.py",
                "                    stream.read_into(scratch[:nbytes])\n",
                "                    try:\n"
                "                        stream.read_into(scratch[:nbytes])\n"
                "                    except Exception:\n"
                "                        return\n",
            ),
        ),
    ),
    Mutant(
        name="seal a block that could be updated only in part, in place of building it",
        edits=(
            (
                f"{DAEMON}/job/worker.py",
                "            scope.check()\n"
                '            _log.info("parity will be built from whole chunks: %s", error)\n'
                "            return None\n",
                "            return len(older.view), piece_digests(block[: len(older.view)], 16)\n",
            ),
            (
                f"{DAEMON}/job/worker.py",
                "import decode_manifest\n",
                "import decode_manifest, piece_digests\n",
            ),
        ),
    ),
    Mutant(
        name="take an empty chunk to lie where its payload ends",
        edits=(
            (
                f"{DAEMON}/parity/update.py",
                "start = max(was.range.start, now.range.start)",
                "start = now.range.start",
            ),
        ),
    ),
    Mutant(
        name="update from an older block whatever it was made from",
        edits=(
            (
                f"{DAEMON}/job/worker.py",
                "before = {positions[rank]: manifest for rank, manifest in "
                "older.manifests.items()}",
                "before = dict(manifests)",
            ),
        ),
    ),
    Mutant(
        name="give a slot away that is being persisted",
        tier=True,
        edits=(
            (
                f"{ENGINE}/slots.py",
                "SlotState.LEFT if self.persisting else SlotState.FREE",
                "SlotState.FREE",
            ),
            (
                f"{ENGINE}/upkeep.py",
                "    if slot.persisting is not None:\n        return True\n",
                "    if slot.persisting is not None:\n        return False\n",
            ),
        ),
    ),
    Mutant(
        name="report files of the set before as those of the one to be persisted",
        tier=True,
        edits=(
            (
                f"{ENGINE}/persisting.py",
                "    current = order is not None and order.number == persist.number\n",
                "    current = order is not None\n",
            ),
        ),
    ),
    Mutant(
        name="wait for a member that cannot persist its ranks",
        tier=True,
        edits=(
            (f"{ENGINE}/persist_leader.py", "    elif missing and failure:\n", "    elif False:\n"),
        ),
    ),
    Mutant(
        name="never free what an order to persist waits for",
        tier=True,
        edits=(
            (
                f"{ENGINE}/persisting.py",
                "        slot.persisted()\n",
                "        pass\n",
            ),
        ),
    ),
    Mutant(
        name="say that a set is persisted although its commit failed",
        tier=True,
        edits=(
            (
                f"{ENGINE}/persist_leader.py",
                "persist.outcome = CommitOutcome(event.error)",
                'persist.outcome = CommitOutcome("")',
            ),
        ),
    ),
    Mutant(
        name="take every generation for one of the present world's ranks",
        worlds=True,
        edits=(
            (
                "core/holdfast_core/protection/recovery.py",
                "        world = membership.world_of(generation)\n        if world is None:\n",
                "        world = membership.world\n        if world is None:\n",
            ),
        ),
    ),
    Mutant(
        name="free what the world before captured as soon as the next one begins",
        worlds=True,
        edits=(
            (
                f"{ENGINE}/upkeep.py",
                "of_others = arena.rank not in mine and membership.is_present(slot.generation)",
                "of_others = arena.rank not in mine",
            ),
        ),
    ),
    Mutant(
        name="keep parity of a snapshot whose rank has loaded other bytes of that generation",
        test="daemon/parity/test_after_a_load.py",
        edits=(
            (
                f"{ENGINE}/upkeep.py",
                "if ready and (not _is_kept(epoch, parity.generation) or "
                "_is_outdated(parity, holdings)):",
                "if ready and not _is_kept(epoch, parity.generation):",
            ),
        ),
    ),
    Mutant(
        name="adopt what a deleted job of the same name has left on nodes",
        test="operator_side/kube/test_same_name.py",
        edits=(
            (
                f"{RECONCILER}/observe/versions.py",
                "if node.job is not None and are_two_jobs(uid, node.job.uid)",
                "if node.job is None",
            ),
        ),
    ),
    Mutant(
        name="compare epochs of two jobs of one name",
        test="operator_side/kube/test_same_name.py",
        edits=(
            (
                f"{RECONCILER}/observe/versions.py",
                " or are_two_jobs(ours.uid, theirs.uid):",
                ":",
            ),
        ),
    ),
    Mutant(
        name="be fenced by an earlier job of the same name",
        test="daemon/test_peer_limits.py",
        edits=(
            (
                "daemon/holdfast_daemon/net/peers.py",
                "if host is None or are_two_jobs(message.uid, host.uid):",
                "if host is None:",
            ),
        ),
    ),
    Mutant(
        name="let a late thread allocate memory of a job that was dropped",
        test="daemon/memory/test_job_storage.py",
        edits=(
            (
                "daemon/holdfast_daemon/memory/job_storage.py",
                "            self._check_kept()\n            decoded",
                "            decoded",
            ),
        ),
    ),
    Mutant(
        name="forget the world of what is safe when too many others follow",
        test="operator_side/reconciler/test_shrinking.py",
        edits=(
            (
                "core/holdfast_core/snapshots/membership.py",
                "is_needed = needed is not None and kept[0].since == needed.since",
                "is_needed = False",
            ),
        ),
    ),
    Mutant(
        name="take a generation of a forgotten world for one of the world before",
        test="core/snapshots/test_values.py",
        edits=(
            (
                "core/holdfast_core/snapshots/membership.py",
                "if world is not None and world.until and generation.epoch >= world.until:",
                "if False:",
            ),
        ),
    ),
    Mutant(
        name="rebuild only the snapshots of ranks that live here",
        worlds=True,
        edits=(
            (
                f"{ENGINE}/rebuilding.py",
                "if membership.is_present(generation) or world is None:",
                "if True:",
            ),
        ),
    ),
    Mutant(
        name="report only to the parity group of the present world",
        worlds=True,
        edits=(
            (
                f"{ENGINE}/convergence.py",
                "if retained is None or not membership.is_present(retained):",
                "if False:",
            ),
        ),
    ),
    Mutant(
        name="let an arena of an earlier world become that of a rank's trainer",
        worlds=True,
        edits=(
            (
                f"{ENGINE}/job.py",
                "largest_slot_bytes=largest, since=world.since)",
                "largest_slot_bytes=largest)",
            ),
        ),
    ),
    Mutant(
        name="skip the vote",
        votes=True,
        edits=(
            (
                "trainer_sdk/holdfast/_elastic/session.py",
                "                self._vote(body)\n            body.stepped",
                "                body.voted = True\n            body.stepped",
            ),
        ),
    ),
    Mutant(
        name="vote before the device has its gradients",
        votes=True,
        edits=(
            (
                f"{ELASTIC}/session.py",
                "            body.proved = self._world.finish_collectives()\n",
                "            pass\n",
            ),
        ),
    ),
    Mutant(
        name="complete a step that the device has not computed",
        votes=True,
        edits=(
            (
                f"{ELASTIC}/session.py",
                "self._carries_out(partial(self._world.finish_collectives, body.proved))",
                "True",
            ),
        ),
    ),
    Mutant(
        name="take a completed step for one whose vote has passed elsewhere",
        votes=True,
        edits=(
            (
                "core/holdfast_core/protection/standing.py",
                "if live[rank].step != newest - 1 or not live[rank].ready:",
                "if live[rank].step < newest - 1:",
            ),
        ),
    ),
    Mutant(
        name="go on live at different steps",
        votes=True,
        edits=(
            (
                "core/holdfast_core/protection/standing.py",
                "    if behind:\n",
                "    if False:\n",
            ),
        ),
    ),
    Mutant(
        # Only a second death, in the hand-over, shows it.
        name="take a new process for whole before it has been given everything",
        votes=True,
        edits=(
            (
                f"{ELASTIC}/session.py",
                "        if live and verdict is not None and session.go_on(",
                "        if live and verdict is not None:\n"
                "            self._hold_after(verdict.step)\n"
                "        if live and verdict is not None and session.go_on(",
            ),
        ),
    ),
    Mutant(
        name="give new ranks nothing",
        votes=True,
        edits=(
            (
                "trainer_sdk/holdfast/_restoring/live.py",
                "scatter(self.exchange, [one.offers for one in given], sources, self.rank)",
                "pass",
            ),
        ),
    ),
    Mutant(
        name="shards: keep the state of the others although the line is older",
        votes=True,
        edits=(
            (
                "core/holdfast_core/protection/replaying.py",
                "    if line == target:\n",
                "    if line <= target:\n",
            ),
        ),
    ),
    Mutant(
        name="shards: keep a state that the line does not have",
        votes=True,
        edits=(
            (
                f"{RESTORING}/restore.py",
                "            if plan.line == plan.target:\n",
                "            if plan.line < plan.target:\n",
            ),
        ),
    ),
    Mutant(
        name="shards: give the lost rank nothing of what all ranks hold",
        votes=True,
        edits=(
            (
                f"{RESTORING}/restore.py",
                "            offers = self._offers(found, plan)\n        try",
                "        try",
            ),
        ),
    ),
    Mutant(
        name="stages: drop logs up to the last save of a protected window, not to its first",
        stages=True,
        edits=((f"{ELASTIC}/session.py", "handle._first)", "handle.step)"),),
    ),
    Mutant(
        name="stages: log nothing of what a replay sends",
        stages=True,
        edits=(
            (
                f"{ELASTIC}/pipeline.py",
                "digest = self.log.add_sent(to, key, bytes_of(tensor))",
                "digest = BoundaryLog(0).add_sent(to, key, bytes_of(tensor))",
            ),
        ),
    ),
    Mutant(
        name="stages: do not log what all ranks have added up",
        stages=True,
        edits=(
            (
                f"{ELASTIC}/pipeline.py",
                "        self._log_sent(EVERYONE, key, tensor)\n",
                "",
            ),
        ),
    ),
    Mutant(
        name="stages: add up in a replay what a stage has alone",
        stages=True,
        edits=(
            (
                f"{ELASTIC}/pipeline.py",
                "            self.replay.take(EVERYONE, key, tensor)\n",
                "            self.replay.take(EVERYONE, key, tensor.clone())\n",
            ),
        ),
    ),
    Mutant(
        name="stages: restore the stages that have their state, too",
        stages=True,
        edits=(
            (
                f"{ELASTIC}/session.py",
                "        own = self._world.rank in plan.scope\n",
                "        own = True\n",
            ),
        ),
    ),
    Mutant(
        name="stages: let those of a scope that have their state keep it",
        stages=True,
        edits=(
            (
                f"{ELASTIC}/session.py",
                "        own = self._world.rank in plan.scope\n",
                "        own = held.step is None\n",
            ),
        ),
    ),
    Mutant(
        name="stages: forget in a second replay who was in the first",
        stages=True,
        edits=(
            (
                f"{ELASTIC}/session.py",
                "        if held.step is None or held.alone:\n",
                "        if held.step is None:\n",
            ),
            (
                f"{ELASTIC}/session.py",
                "        step = None if held.alone else held.step\n",
                "        step = held.step\n",
            ),
        ),
    ),
    Mutant(
        name="stages: count each replay that is cut off, although the next scope is wider",
        stages=True,
        edits=(
            (
                "core/holdfast_core/protection/replaying.py",
                "fruitless=fruitless + (widest > 0 and scope <= widest and reached <= before),",
                "fruitless=fruitless + (widest > 0),",
            ),
        ),
    ),
    Mutant(
        name="stages: count no replay that is cut off",
        test="core/protection/test_replaying.py",
        edits=(
            (
                "core/holdfast_core/protection/replaying.py",
                "if progress.fruitless >= FRUITLESS_MAX:",
                "if False:",
            ),
        ),
    ),
    Mutant(
        name="stages: forget that a replay has come to its end",
        plays="test_a_replay_that_ends_has_come_further",
        edits=(
            (
                f"{ELASTIC}/session.py",
                "            self._note_repeated(plan.target)\n",
                "",
            ),
        ),
    ),
    Mutant(
        name="stages: go on counting fruitless replays after a step of all ranks",
        plays="test_a_step_of_all_ranks_ends_the_count_of_fruitless_replays",
        edits=(
            (
                f"{ELASTIC}/session.py",
                "        self._progress = ReplayProgress()\n        if self._world.ended:",
                "        if self._world.ended:",
            ),
        ),
    ),
    Mutant(
        name="stages: take a step that was repeated before for progress",
        test="core/protection/test_replaying.py",
        edits=(
            (
                "core/holdfast_core/protection/replaying.py",
                "        before=reached,\n",
                "        before=line,\n",
            ),
        ),
    ),
    Mutant(
        name="stages: send a rank back that a replica gives its state",
        test="core/protection/test_replaying.py",
        edits=(
            (
                "core/holdfast_core/protection/replaying.py",
                "for rank in lost if rank not in replicated}",
                "for rank in lost}",
            ),
        ),
    ),
    Mutant(
        name="stages: count on the log of a rank that a replica gives its state",
        stages=True,
        edits=(
            (
                "core/holdfast_core/protection/replaying.py",
                "if not _has_logged(ranks[giver], line, target)}",
                "if not (giver in replicated or _has_logged(ranks[giver], line, target))}",
            ),
        ),
    ),
    Mutant(
        name="stages: let neighbours return what they have sent in place of what they had received",
        test="sdk/elastic/test_boundary_log.py",
        edits=(
            (
                f"{ELASTIC}/boundary_log.py",
                "for message in part.copies:\n                    self._keep_sent(rank, message)",
                "for message in part.sent:\n                    self._keep_sent(rank, message)",
            ),
        ),
    ),
    Mutant(
        name="stages: count on a returned log further back than all neighbours reach",
        stages=True,
        edits=(
            (
                f"{ELASTIC}/boundary_log.py",
                "first = max(part.first for part in parts.values())",
                "first = min(part.first for part in parts.values()) - 100",
            ),
        ),
    ),
    Mutant(
        name="stages: return a log without the part of a neighbour that has none",
        stages=True,
        edits=(
            (
                f"{ELASTIC}/stage_replay.py",
                "if rank in of and not of.intersection(without):",
                "if rank in of and rank not in without:",
            ),
        ),
    ),
    Mutant(
        # Either rule alone keeps them out: an execution drops what the one before has logged, and
        # logs all of its messages again, under their names.
        name="stages: replay from logs of a timeline that was given up",
        stages=True,
        edits=(
            (
                f"{ELASTIC}/boundary_log.py",
                "        self._steps.clear()\n",
                "",
            ),
            (
                f"{ELASTIC}/boundary_log.py",
                "for late in [one for one in self._steps if one >= step]:",
                "for late in [one for one in self._steps if one > step + 100]:",
            ),
            (
                f"{ELASTIC}/boundary_log.py",
                "        self._steps[step] = _Step()\n",
                "        self._steps.setdefault(step, _Step())\n",
            ),
            (
                f"{ELASTIC}/boundary_log.py",
                "            step.sent[to, message.key] = message\n",
                "            step.sent.setdefault((to, message.key), message)\n",
            ),
        ),
    ),
    Mutant(
        name="stages: repeat steps with logs that do not reach back to the line",
        stages=True,
        edits=(
            (
                "core/holdfast_core/protection/replaying.py",
                "    return kept and evidence.logged_from <= line + 1 and target",
                "    return kept and target",
            ),
        ),
    ),
    Mutant(
        name="stages: trust what a replay sends",
        stages=True,
        edits=(
            (
                f"{ELASTIC}/pipeline.py",
                "if self._expected.pop((rank, key), None) != digest:",
                "if self._expected.pop((rank, key), None) is None:",
            ),
        ),
    ),
    Mutant(
        name="stages: use a log whatever its checksum",
        stages=True,
        edits=(
            (
                f"{ELASTIC}/boundary_log.py",
                "if xxhash.xxh3_64_intdigest(self.data) != self.digest:",
                "if False:",
            ),
        ),
    ),
    Mutant(
        name="windows: go on live while units are frozen",
        stages=True,
        edits=(
            (f"{ELASTIC}/session.py", "        if self._session.repeats:\n", "        if False:\n"),
        ),
    ),
    Mutant(
        name="windows: load the weights of the save after",
        stages=True,
        edits=(
            (
                f"{RESTORING}/replay.py",
                "frame = self.frames[slot]",
                "frame = self.frames[min(slot + 1, len(self.frames) - 1)]",
            ),
        ),
    ),
    Mutant(
        name="windows: let optimizers step with the gradients of frozen units",
        stages=True,
        edits=(
            (
                f"{RESTORING}/replay.py",
                "if self._schedule.slot(anchor.place.unit) > at:",
                "if False:",
            ),
        ),
    ),
    Mutant(
        name="windows: begin with the extras of the last save",
        stages=True,
        edits=(
            (
                f"{RESTORING}/reading.py",
                "else window.restored_extras)",
                "else window.extras[-1])",
            ),
        ),
    ),
    Mutant(
        name="windows: repeat all optimizer steps with the newest learning rate",
        stages=True,
        edits=(
            (
                f"{RESTORING}/repeating.py",
                "decode_extras(record.optimizer_steps[slot])",
                "decode_extras(record.optimizer_steps[-1])",
            ),
        ),
    ),
    Mutant(
        name="windows: hold gradients that were not yet clipped",
        stages=True,
        edits=(
            (
                f"{CAPTURE}/optimizer_steps.py",
                "        room.gradient.copy_(local)\n",
                "        room.gradient.copy_(local * 2)\n",
            ),
        ),
    ),
    Mutant(
        name="windows: take a window that repeats the optimizer for one that repeats training",
        stages=True,
        edits=(
            (
                "trainer_sdk/holdfast/_capture/window_records.py",
                "return self.first if self.repeats is Repeats.TRAINING else self.last",
                "return self.first",
            ),
        ),
    ),
    Mutant(
        name="windows: look for the frames of another world's ranks where one of them has its own",
        reshapes=True,
        edits=(
            (
                f"{RESTORING}/other_windows.py",
                "frames_of(layout, schedule, records[old].state_end)",
                "frames_of(layout, schedule, record.state_end)",
            ),
        ),
    ),
    Mutant(
        name="windows: read the frame of the step before in another world",
        reshapes=True,
        edits=(
            (
                f"{RESTORING}/other_windows.py",
                "for e in of_old[slot]",
                "for e in of_old[max(1, slot - 1)]",
            ),
        ),
    ),
    Mutant(
        name="windows: let another world train the steps of a window again",
        test="sdk/restoring/test_other_world.py",
        edits=(
            (
                f"{RESTORING}/other_world.py",
                "snapshot.window is not None and snapshot.window.repeats is Repeats.TRAINING:",
                "False:",
            ),
        ),
    ),
    Mutant(
        name="windows: go on with a window in which experts have changed ranks",
        edits=(
            (
                "trainer_sdk/holdfast/_save/pipeline.py",
                '            self.drop("experts have changed ranks")\n',
                "",
            ),
        ),
        test="sdk/moe/test_snapshots_of_some_experts.py",
    ),
    Mutant(
        name="windows: capture the steps of seats with their layer where no expert is captured",
        edits=(
            (
                "trainer_sdk/holdfast/_state/capture.py",
                "            yield replace(found, of_stack=place.stacked)",
                "            yield found",
            ),
        ),
        test="sdk/moe/test_snapshots_of_some_experts.py",
    ),
    Mutant(
        name="windows: compare an expert with what its seat held before a move",
        edits=(
            (
                f"{CAPTURE}/optimizer_steps.py",
                "        self._left.clear()\n        if self._trials",
                "        if self._trials",
            ),
        ),
        test="sdk/moe/test_snapshots_of_some_experts.py",
    ),
    Mutant(
        name="windows: let each rank take the length that it has measured itself",
        edits=(
            (
                "trainer_sdk/holdfast/_agree/window_order.py",
                "agreed_length(total[: len(lengths)], self._length)",
                "agreed_length(lengths, self._length)",
            ),
        ),
        test="sdk/capture/test_window_lengths.py",
    ),
    Mutant(
        name="windows: begin the next length in the middle of a window",
        edits=(
            (
                "core/holdfast_core/experts/window_lengths.py",
                "self.next_first, self.next_number = span.last + 1, span.number + 1",
                "self.next_first, self.next_number = span.first + 2, span.number + 1",
            ),
        ),
        test="sdk/capture/test_window_lengths.py",
    ),
    Mutant(
        name="seats: give nodes their part of a plan by what they hold of the first layer",
        edits=(
            (
                "core/holdfast_core/elastic_experts/moving.py",
                "    for at, layer in enumerate(plan.layers):\n"
                "        for expert, holders in enumerate(layer.copies):\n"
                "            wants",
                "    for at, layer in enumerate(plan.layers[:1]):\n"
                "        for expert, holders in enumerate(layer.copies):\n"
                "            wants",
            ),
        ),
        test="core/elastic_experts/test_moving.py",
    ),
    Mutant(
        name="seats: divide the gradient of an expert by the number of its holders",
        edits=(
            (
                f"{MOE}/gradients.py",
                "            sums[id(one)].to(self._stacks[0].dtype)",
                "            (sums[id(one)] / len(one.holders)).to(self._stacks[0].dtype)",
            ),
        ),
        test="sdk/moe/test_layer.py",
    ),
    Mutant(
        name="seats: forget a moment when experts move",
        edits=(
            (
                f"{MOE}/reseating.py",
                "                if stack.layer == at\n",
                '                if stack.layer == at and stack.key != "exp_avg"\n',
            ),
        ),
        test="sdk/moe/test_reseating.py",
    ),
    Mutant(
        name="seats: put an expert that arrives into the seat that it had elsewhere",
        edits=(
            (
                f"{MOE}/reseating.py",
                "                _bytes(tensor[seat_of[expert]])\n",
                "                _bytes(tensor[expert % len(tensor)])\n",
            ),
        ),
        test="sdk/moe/test_reseating.py",
    ),
    Mutant(
        name="seats: weigh moves by each rank's own time",
        edits=((f"{MOE}/reseating.py", "step_s=said[0].step_s", "step_s=step_s"),),
        test="sdk/moe/test_reseating.py",
    ),
    Mutant(
        name="seats: capture experts by the plan before",
        edits=(
            (
                f"{MOE}/layer.py",
                "        self.plan = plan\n"
                "        self.experts.captured = self.captured_by_plan()\n",
                "        self.experts.captured = self.captured_by_plan()\n"
                "        self.plan = plan\n",
            ),
        ),
        test="sdk/moe/test_reseating.py",
    ),
    Mutant(
        name="seats: leave experts out of the first snapshot after they have moved",
        edits=(
            (
                f"{CAPTURE}/partial.py",
                "        self._ledger, self._marks = self._ledger.begun_anew(), {}\n",
                "",
            ),
        ),
        test="sdk/moe/test_snapshots_of_some_experts.py",
    ),
    Mutant(
        name="seats: go on live with the captures of another world",
        edits=(
            (
                f"{CAPTURE}/partial.py",
                "replace(self._ledger.begun_anew(), snapshots=number)",
                "replace(self._ledger, snapshots=number)",
            ),
        ),
        test="sdk/moe/test_snapshots_of_some_experts.py",
    ),
    Mutant(
        name="seats: count saves on from each rank's own when going on live",
        edits=(
            (
                f"{RESTORING}/live.py",
                "snapshots=max(one.saves for one in given)",
                "snapshots=self.experts.ledger.snapshots",
            ),
        ),
        test="sdk/moe/test_snapshots_of_some_experts.py",
    ),
    Mutant(
        name="go live on samples of what was left alone, in place of digests of all bytes",
        edits=(
            (
                f"{ELASTIC}/step_start.py",
                "self._unchanged.first_changed() or self._differing()",
                "self._unchanged.first_changed()",
            ),
        ),
        test="sdk/elastic/test_step_start.py",
    ),
    Mutant(
        name="go live on digests of small tensors alone",
        edits=(
            (
                f"{STATE}/capture.py",
                'if name in self.anchors\n            or raw(tensor).device.type == "cpu"\n'
                "            or raw(tensor)",
                "if raw(tensor)",
            ),
        ),
        test="sdk/elastic/test_step_start.py",
    ),
    Mutant(
        name="keep a granted slot when its save fails",
        edits=(
            (
                f"{SAVE}/saver.py",
                "None if self.pipeline.snapshot else self._link.give_back(why)",
                "None",
            ),
        ),
        test="sdk/save/test_granted_slots.py",
    ),
    Mutant(
        name="leave a slot granted whose trainer never learned of it",
        edits=(
            (
                f"{ENGINE}/job.py",
                "        self._take_back(session.rank)\n        slot = upkeep",
                "        slot = upkeep",
            ),
        ),
        test="daemon/engine/test_carrying.py",
    ),
    Mutant(
        name="keep processes that have nothing to go on with and nothing to go back to",
        edits=((f"{ENGINE}/state.py", "(protected or held)", "True"),),
        test="daemon/engine/test_following.py",
    ),
    Mutant(
        name="failover: place a job anew while its daemons have not spoken",
        edits=(
            (
                f"{RECONCILER}/reconcile.py",
                "        forget_reshaped,\n        free_earlier_shape,\n        _await_homes,\n",
                "        forget_reshaped,\n        free_earlier_shape,\n",
            ),
        ),
        test=FAILOVERS,
    ),
    Mutant(
        name="failover: adopt an older epoch while a newer one may be unheard",
        edits=(
            (
                f"{RECONCILER}/reconcile.py",
                "newest.epoch < state.epoch and unheard_homes",
                "newest.epoch < 0 and unheard_homes",
            ),
        ),
        test=FAILOVERS,
    ),
    Mutant(
        name="failover: take a daemon that has not spoken for one that holds nothing",
        edits=(
            (
                f"{RECONCILER}/observe/remembered.py",
                "return Word.NOT_HEARD if node.heartbeat_at == NEVER else Word.HOLDS_NOTHING",
                "return Word.HOLDS_NOTHING",
            ),
        ),
        test=FAILOVERS,
    ),
    Mutant(
        name="failover: wait for an epoch that was stored and never published",
        edits=(
            (
                f"{RECONCILER}/observe/remembered.py",
                "for node in nodes.values() if state.homes else ():",
                "for node in ():",
            ),
        ),
        test=FAILOVERS,
    ),
    Mutant(
        name="failover: have newer snapshots freed with those of an earlier shape",
        edits=(
            (
                f"{RECONCILER}/membership/suspending.py",
                "DropJob(up_to_epoch=state.void_epoch)",
                "DropJob()",
            ),
        ),
        test=FAILOVERS,
    ),
    Mutant(
        name="failover: remember no nodes of members",
        edits=((f"{RECONCILER}/reconcile.py", "replace(state, homes=homes)", "state"),),
        test=FAILOVERS,
    ),
    Mutant(
        name="failover: give up memory that only silence tells to be lost",
        edits=(
            (
                f"{RECONCILER}/membership/replacing.py",
                "        cause.presumed\n",
                "        False\n",
            ),
        ),
        test="operator_side/reconciler/test_patience.py",
    ),
    Mutant(
        name="failover: hurry the daemons that connect after others",
        edits=(
            (
                f"{RECONCILER}/observe/evidence.py",
                "DIAL_S + max(0.0, newest - state.attentive_since)",
                "DIAL_S",
            ),
        ),
        test="operator_side/reconciler/test_patience.py",
    ),
    Mutant(
        name="failover: wait for a dead daemon as long as others connect again",
        edits=(
            (
                f"{RECONCILER}/observe/evidence.py",
                "node_of(observed, member).first_heard_at for",
                "node_of(observed, member).heartbeat_at for",
            ),
        ),
        test="operator_side/reconciler/test_patience.py",
    ),
    Mutant(
        name="failover: judge the memory of a daemon that has not spoken",
        edits=(
            (
                f"{KUBE}/cluster/nodes.py",
                "reported is None or has_memory(reported",
                "has_memory(view",
            ),
        ),
        test="operator_side/kube/test_nodes.py",
    ),
    Mutant(
        name="failover: renew daemons before every job was looked at",
        edits=((f"{KUBE}/job/fleet.py", "loop is not None and (loop.has_looked", "(loop is None"),),
        test="operator_side/kube/test_fleet.py",
    ),
    Mutant(
        name="let half of the replicas outvote the other half",
        edits=(
            (
                "core/holdfast_core/corruption.py",
                "    if 2 * count <= len(stated):\n",
                "    if 2 * count < len(stated):\n",
            ),
        ),
        test="core/test_corruption.py",
    ),
    Mutant(
        name="blame a minority that does not explain all differences",
        edits=(
            (
                "core/holdfast_core/corruption.py",
                "            return frozenset()\n    return wrong\n",
                "            continue\n    return wrong\n",
            ),
        ),
        test="core/test_corruption.py",
    ),
    Mutant(
        name="blame somebody although repeated steps gave nobody's bytes again",
        edits=(
            (
                "core/holdfast_core/corruption.py",
                "    return wrong if len(right) == 1 else frozenset()\n",
                "    return wrong if right else wrong - {min(wrong, default=0)}\n",
            ),
        ),
        test="sdk/agree/test_corruption.py",
    ),
    Mutant(
        name="judge by the last comparison that differed, to which gradients have spread",
        edits=(
            (
                "trainer_sdk/holdfast/_agree/replica_check.py",
                "or self.problem is None or self._is_better(divergence):",
                "or True:",
            ),
        ),
        test="sdk/agree/test_corruption.py",
    ),
    Mutant(
        name="keep processes whose state wrong gradients have reached",
        edits=(
            (
                f"{RECONCILER}/membership/recovering.py",
                "    anew = anew or any(",
                "    anew = anew and any(",
            ),
        ),
        test="operator_side/reconciler/test_corruption.py",
    ),
    Mutant(
        name="replace a node each time that replicas differ",
        edits=(
            (
                f"{RECONCILER}/observe/corruption.py",
                "not is_begun and now - undone_at < PAUSE_S",
                "not is_begun and now < undone_at",
            ),
        ),
        test="operator_side/reconciler/test_corruption.py",
    ),
    Mutant(
        name="go back to generations that nobody has compared",
        edits=(
            (
                f"{RECONCILER}/observe/corruption.py",
                "if last is None or not last.compared_all or not",
                "if last is None or not",
            ),
        ),
        test="operator_side/reconciler/test_corruption.py",
    ),
    Mutant(
        name="undo what is over",
        edits=(
            (
                f"{RECONCILER}/observe/corruption.py",
                " or not _is_reported(last, membership, observed):",
                " or last.epoch != membership.epoch:",
            ),
        ),
        test="operator_side/reconciler/test_corruption.py",
    ),
    Mutant(
        name="take replicas that differ for the consequence of another failure",
        edits=(
            (
                f"{RECONCILER}/observe/evidence.py",
                "if c.corrupts or not is_explained(c)",
                "if not is_explained(c)",
            ),
        ),
        test="operator_side/reconciler/test_corruption.py",
    ),
    Mutant(
        name="blame ranks that only received what another one had computed wrongly",
        edits=(
            (
                "core/holdfast_core/reexecution.py",
                "            if other != rank\n",
                "            if other != rank and rank\n",
            ),
        ),
        test="core/test_reexecution.py",
    ),
    Mutant(
        name="excuse a rank by what others gave after it had computed wrongly",
        edits=(
            (
                "core/holdfast_core/reexecution.py",
                "for each in odd.given[:at]:\n",
                "for each in odd.given:\n",
            ),
        ),
        test="core/test_reexecution.py",
    ),
    Mutant(
        name="name the rank that got a sum which another rank added up wrongly",
        edits=(
            (
                "core/holdfast_core/reexecution.py",
                " and not differences[found[0]].has_sums",
                "",
            ),
        ),
        test="core/test_reexecution.py",
    ),
    Mutant(
        name="go back although a wrong execution left nothing behind",
        edits=(
            (
                f"{RECONCILER}/observe/corruption.py",
                "last.proof is Proof.UNDECIDED or last.proof.may_name",
                "last.proof is Proof.UNDECIDED",
            ),
        ),
        test="operator_side/reconciler/test_corruption.py",
    ),
    Mutant(
        name="go on with the first execution although the others differ from it",
        edits=(
            (
                f"{ELASTIC}/step_checks.py",
                "(compared < EXECUTIONS and unequal)",
                "False",
            ),
        ),
        test="sdk/elastic/test_step_checks.py",
    ),
    Mutant(
        name="name a rank although a third one contradicts neither",
        edits=(
            (
                "core/holdfast_core/repeated_work.py",
                "elif third is not None and third == own[one.owner][one.sample]:",
                "elif third is not None:",
            ),
        ),
        test="core/test_repeated_work.py",
    ),
    Mutant(
        name="name a rank that a single check has found",
        edits=(
            (
                "core/holdfast_core/repeated_work.py",
                "return Verdict(candidates=now.candidates)",
                "return now",
            ),
        ),
        test="core/test_repeated_work.py",
    ),
    Mutant(
        name="compare the work of ranks of different kinds",
        edits=(
            (
                "core/holdfast_core/repeated_work.py",
                "found.setdefault(kind, []).append(rank)",
                "found.setdefault(0, []).append(rank)",
            ),
        ),
        test="core/test_repeated_work.py",
    ),
)


def planted(mutant: Mutant) -> dict[str, str]:
    """The sources that `mutant` changes, with its bug in them, by file.

    Raises:
        ValueError: when the sources no longer have the text that it replaces.
    """
    texts: dict[str, str] = {}
    for file, before, after in mutant.edits:
        text = texts.get(file) or (ROOT / file).read_text()
        if before not in text:
            raise ValueError(f"{mutant.name}: {file} has changed; mend the mutant")
        texts[file] = text.replace(before, after, 1)
    return texts


def survives(mutant: Mutant) -> str:
    """Run the simulation with `mutant`: the first line of its complaint; empty when it finds
    nothing."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copies = [str(shutil.copytree(ROOT / name, copy / name)) for name in SOURCES]
        for file, text in planted(mutant).items():
            (copy / file).write_text(text)
        command = ["-m", "simulation", "--steps", "8", "--count", str(SCHEDULES)]
        if mutant.votes:
            command = ["-m", "voting"]
        if mutant.stages:
            command = ["-m", "staging", "--count", str(STAGE_SCHEDULES)]
        if mutant.reshapes:
            command = ["-m", "reshaping", "--count", str(RESHAPING_SCHEDULES)]
        if mutant.test:
            test = str(ROOT / "tests" / "unit" / mutant.test)
            command = ["-m", "pytest", "-qx", "-n0", "-p", "no:cacheprovider", test]
        if mutant.plays:
            test = f"{SIMULATION.parent / 'test_stages.py'}::{mutant.plays}"
            command = ["-m", "pytest", "-qx", "-n0", "-p", "no:cacheprovider", test]
        command += ["--tier"] if mutant.tier else []
        command += ["--worlds"] if mutant.worlds else []
        paths = [*copies, str(SIMULATION), str(UNIT_HELPERS)]
        try:
            result = subprocess.run(
                [sys.executable, "-P", *command],
                env={**os.environ, "PYTHONPATH": ":".join(paths)},
                capture_output=True,
                text=True,
                check=False,
                timeout=TIME_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return f"no end within {TIME_LIMIT_S} s"
    complaints = ("AssertionError: seed", "AssertionError: crash", "FAILED ")
    told = [*result.stderr.splitlines(), *result.stdout.splitlines()]
    found = [line for line in told if line.startswith(complaints)]
    if result.returncode and not found:
        raise SystemExit(
            f"{mutant.name}: nothing ran; mend the mutant\n{result.stdout[-2000:]}"
            f"{result.stderr[-2000:]}"
        )
    return found[0][:60] if found else ""


def main() -> int:
    """Print the result for each mutant, or for those whose names contain one of the arguments;
    1 when one survives."""
    survivors, wanted = 0, sys.argv[1:] or [""]
    for mutant in MUTANTS:
        if not any(part in mutant.name for part in wanted):
            continue
        complaint = survives(mutant)
        survives_for_no_reason = not complaint and not mutant.enforced_by
        survivors += survives_for_no_reason
        fate = "found" if complaint else "SURVIVED" if survives_for_no_reason else "enforced"
        print(f"{fate:8} {mutant.name}  {complaint or mutant.enforced_by}", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
