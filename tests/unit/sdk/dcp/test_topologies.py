"""A job of dp4·ep4 loads as dp2·ep2 and as dp1·ep1, with ranks played one after another.

`test_dcp_processes` does it with real ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_example import Hashes, distributed_state, hashes, make_model, train_moe
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast import ShardStrategy, Topology
from holdfast._agree.plan import layout_of, own_shards, plan_together, table_of
from holdfast._state.capture import LiveState
from holdfast._state.collect import collect
from holdfast._state.extras import encode_extras
from holdfast.dcp import HoldfastReader, load_into
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import (
    encode_layout,
    encode_manifest,
    layout_id,
    piece_digests,
)
from holdfast_core.snapshots.manifests import Manifest
from holdfast_storage.sets import SetStore

RANKS = 4
SAVED = Topology(dp=RANKS, ep=RANKS)
JOB, GENERATION = "default.moe", Generation(3, 40)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Saved:
    """The state of four ranks, and its hashes."""

    def __init__(self, uri: Path, strategy: ShardStrategy) -> None:
        self.uri = str(uri)
        self.hashes: Hashes = {}
        example = train_moe()
        self.lives = []
        for rank in range(RANKS):
            model = make_model(example, seed=1, ep=RANKS, ep_index=rank)
            optimizer = example.MasterAdamW(model.parameters(), lr=0.1)
            for _ in range(2):
                for p in model.parameters():
                    p.grad = p.detach().clone()
                optimizer.step()
            self.lives.append(LiveState(model, [optimizer], SAVED, rank))
            self.hashes.update(hashes(model, optimizer, rank))
        self.persist(strategy)

    def persist(self, strategy: ShardStrategy) -> None:
        """As sessions plan and capture it, and daemons write it."""
        store = SetStore(self.uri, JOB)
        sources = [live.discover() for live in self.lives]
        tables = {rank: table_of(found) for rank, found in enumerate(sources)}
        sizes = dict.fromkeys(range(RANKS), 1000)
        files = []
        for rank, found in enumerate(sources):
            base = plan_together(rank, SAVED, tables, sizes, strategy)
            live = self.lives[rank]
            extras = encode_extras(collect(live, {}, GENERATION.step))
            shards = own_shards(base, tables[rank])
            layout = layout_of(base, tables[rank], shards, len(extras), found)
            payload = bytearray(layout.extras_offset) + extras
            by_name = {source.name: source for source in found}
            for entry in layout.entries:
                part = by_name[entry.tensor].flat()[entry.start : entry.start + entry.nbytes]
                payload[entry.offset : entry.offset + entry.nbytes] = part.numpy().tobytes()
            encoded = encode_layout(layout)
            manifest = Manifest(
                job=JOB,
                rank=rank,
                world_size=RANKS,
                generation=GENERATION,
                layout_id=layout_id(encoded),
                payload_bytes=len(payload),
                extras_offset=layout.extras_offset,
                extras_bytes=len(extras),
                piece_bytes=layout.piece_bytes,
                digests=piece_digests(bytes(payload), layout.piece_bytes),
            )

            def read(first: int, end: int, data: bytes = bytes(payload)) -> Iterator[memoryview]:
                yield memoryview(data)[first:end]

            file = store.write_rank(
                GENERATION, rank, layout=encoded, manifest=encode_manifest(manifest), read=read
            )
            files.append(file)
        store.commit(GENERATION, files)


@pytest.fixture(scope="module", params=ShardStrategy)
def saved(tmp_path_factory: pytest.TempPathFactory, request: Any) -> Saved:
    """By whole tensors, and in ranges that end in the middle of rows."""
    return Saved(tmp_path_factory.mktemp("tier"), request.param)


@pytest.fixture(params=[0, 1])
def rank_of_two(request: Any) -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=2)
    yield request.param
    dist.destroy_process_group()


def test_each_of_two_ranks_has_its_half_of_the_experts(saved: Saved, rank_of_two: int) -> None:
    example = train_moe()
    model = make_model(example, seed=7, ep=2, ep_index=rank_of_two)
    optimizer = example.MasterAdamW(model.parameters(), lr=0.5)
    state = distributed_state(model, optimizer, init_device_mesh("cpu", (2,)))
    load(state, storage_reader=HoldfastReader(saved.uri, job=JOB), no_dist=True)
    found = hashes(model, optimizer, rank_of_two)
    assert f"layers.1.moe.experts.w_in[{2 * rank_of_two}]:master" in found
    assert found == {name: saved.hashes[name] for name in found}


def test_one_rank_has_everything(saved: Saved) -> None:
    example = train_moe()
    model = make_model(example, seed=8)
    optimizer = example.MasterAdamW(model.parameters(), lr=0.5)
    states = {name: optimizer.state[p] for name, p in model.named_parameters()}
    state: dict[str, Any] = {name: p.detach() for name, p in model.named_parameters()}
    reader = HoldfastReader(saved.uri, job=JOB, generation=GENERATION)
    load({**state, "optim": {"state": states}}, storage_reader=reader)
    assert hashes(model, optimizer, 0) == saved.hashes


def test_one_rank_takes_it_in_place(saved: Saved) -> None:
    example = train_moe()
    model = make_model(example, seed=9)
    optimizer = example.MasterAdamW(model.parameters(), lr=0.5)
    torch.nn.init.zeros_(model.get_parameter("head.weight"))
    reader = load_into(model, optimizer, saved.uri, job=JOB)
    assert hashes(model, optimizer, 0) == saved.hashes
    assert (reader.generation, optimizer.param_groups[0]["lr"]) == (GENERATION, 0.1)
