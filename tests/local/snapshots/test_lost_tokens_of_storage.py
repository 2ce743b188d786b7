"""The example trains with copies that leave experts out, loses all memory, and goes on from
storage: what the older experts cost is counted to the token."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from test_lost_tokens_shown import WAIT_S, has_lost, losses, small_job

from holdfast._capture.partial_state import PartialState
from holdfast._state.extras import split_extras
from holdfast_cli.local import LocalCluster, LocalSettings
from holdfast_core.durable.sets import StoredSet
from holdfast_core.job.persistence import Persistence, PersistInterval
from holdfast_core.job.schema import MoETrainingJob
from holdfast_core.job.snapshots import PartialExperts, PolicySpec, PolicyType
from holdfast_core.snapshots.units import UnitKey
from holdfast_storage.sets import SetStore

EVERY_STEPS = 5
COPIES = 4


def two_level_job(uri: str) -> MoETrainingJob:
    """Two of four experts in a snapshot, one in a copy."""
    job, replace = small_job(), msgspec.structs.replace
    policy = PolicySpec(
        type=PolicyType.PARTIAL_EXPERTS,
        partial_experts=PartialExperts(experts_per_layer=2, loss_limit=1),
    )
    persistence = Persistence(
        uri=uri, interval=PersistInterval(steps=EVERY_STEPS), keep=1, experts=1
    )
    snapshot = replace(job.spec.snapshot, policy=policy)
    return replace(job, spec=replace(job.spec, snapshot=snapshot, persistence=persistence))


def expected_loss(store: SetStore, stored: StoredSet) -> int:
    """Tokens of all ranks that experts as old as storage has them lack."""
    versions = {u.unit: u.version for file in stored.files for u in file.units}
    lost = 0
    for rank in range(stored.world_size):
        opened = store.open_rank(stored, rank)
        content = opened.content
        data = bytearray(content.payload_bytes)
        opened.read_into(0, opened.pieces, memoryview(data))
        end = content.extras_offset + content.extras_bytes
        _, of_experts = split_extras(bytes(data[content.extras_offset : end]))
        ledger = PartialState.decode(of_experts).ledger
        counts = {(UnitKey.parse(e.unit), e.generation): e.tokens for e in content.experts}
        counts |= {(UnitKey.parse(e.unit), e.generation): e.tokens for e in content.older}
        counts |= {(u, v.generation): v.tokens for u, held in ledger.versions.items() for v in held}
        for name, version in versions.items():
            unit = UnitKey.parse(name)
            # Of a capture that this rank did not learn of, the newest one before counts.
            known = [g for u, g in counts if u == unit and g <= version]
            lost += ledger.tokens[unit] - counts[unit, max(known)]
    return lost


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.exhaustive
def test_what_older_experts_cost_is_counted_to_the_token(directory: Path) -> None:
    tier = directory / "tier"
    job = two_level_job(str(tier))
    store = SetStore(str(tier), job.key)

    ever: set[str] = set()

    def are_made(_: object) -> bool:
        """Whether some copies were complete, those included that are removed by now."""
        ever.update(path.parent.name for path in tier.rglob("manifest.json"))
        return len(ever) >= COPIES

    async def train_and_lose_everything() -> None:
        cluster = LocalCluster(job, LocalSettings(directory=directory / "first"))
        await cluster.start()
        try:
            await cluster.wait_for(are_made, timeout_s=WAIT_S)
        finally:
            await cluster.stop()

    asyncio.run(train_and_lose_everything())
    (stored, *_) = store.complete()
    assert stored.needs, "the newest copy names older ones"
    expected = expected_loss(store, stored)

    async def go_on() -> None:
        async with LocalCluster(job, LocalSettings(directory=directory / "second")) as cluster:
            status = await cluster.wait_for(has_lost, timeout_s=WAIT_S)
            lost = losses(status)
            assert lost is not None and lost.newest is not None
            assert lost.newest.step == stored.generation.step
            assert lost.newest.lost_tokens == lost.newest.total_tokens == expected > 0

    asyncio.run(go_on())
