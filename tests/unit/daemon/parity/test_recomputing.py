"""A replica that is brought forward from gradients is the owner's payload, whatever they say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from msgspec import structs
from recomputed_state import COUNT, PIECE, Trainer

from holdfast_core.errors import StaleEpochError
from holdfast_core.experts.recompute import BESIDE_STATE
from holdfast_core.protection.codes import BlockId, Code
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import encode_layout, piece_digests, round_up
from holdfast_core.snapshots.manifests import Manifest
from holdfast_daemon.memory.job_bytes import Held
from holdfast_daemon.parity.changes import _changes
from holdfast_daemon.parity.combining import Effort, Stream
from holdfast_daemon.parity.recomputing import Recomputed, forwards
from holdfast_daemon.parity.update import build_from_changes

STATE_BYTES, GRADIENT_BYTES = 14 * COUNT, 2 * COUNT


@dataclass
class Bytes:
    data: bytes
    at: int = 0

    def read_into(self, view: memoryview) -> None:
        view[:] = self.data[self.at : self.at + len(view)]
        self.at += len(view)

    def close(self) -> None:
        pass


@dataclass
class Replica:
    """What position 1 of a pair holds of position 0."""

    trainer: Trainer
    code: Code = field(default_factory=lambda: Code(2, 1, 1))
    counted: Recomputed = field(default_factory=Recomputed)
    payloads: dict[int, bytes] = field(default_factory=dict)
    step: int = 0
    block: bytes = b""
    sent_bytes: int = 0

    def train(self, captured: set[int], **wrong: float) -> None:
        payload = self.trainer.train(captured, **wrong)  # type: ignore[arg-type]
        self.payloads[self.trainer.step] = payload

    def manifest(self, step: int) -> Manifest:
        payload = self.payloads[step]
        return Manifest(
            job="job",
            rank=0,
            world_size=2,
            generation=Generation(1, step),
            layout_id="a" * 32,
            payload_bytes=len(payload),
            extras_offset=self.trainer.layout.extras_offset,
            extras_bytes=100,
            piece_bytes=PIECE,
            digests=piece_digests(payload, PIECE),
        )

    def build(self) -> None:
        """Hold the newest payload as it is."""
        self.step = self.trainer.step
        self.block = self.payloads[self.step]

    def open_change(
        self, position: int, base: Generation, offset: int, nbytes: int, piece_bytes: int
    ) -> Stream:
        def held(step: int) -> Held:
            def read_into(at: int, view: memoryview) -> None:
                view[:] = self.payloads[step][at : at + len(view)]

            return Held(manifest=self.manifest(step), read_into=read_into)

        both = [held(base.step), held(self.trainer.step)]
        data = b"".join(_changes(both, offset, nbytes, piece_bytes))
        self.sent_bytes += nbytes
        return Bytes(data)

    def bring_forward(self, check: Callable[[], None] = lambda: None) -> None:
        """From the generation that is held to the newest; it is then what is held."""
        before, after = {0: self.manifest(self.step)}, {0: self.manifest(self.trainer.step)}
        layouts = {0: encode_layout(self.trainer.layout)}
        block = memoryview(bytearray(b"\x55" * (len(self.block) + 2 * PIECE)))
        self.sent_bytes = 0
        used, digests = build_from_changes(
            block,
            memoryview(self.block),
            piece_digests(self.block, PIECE),
            code=self.code,
            which=BlockId(1),
            before=before,
            after=after,
            fetch=self,
            check=check,
            effort=Effort(stride_bytes=3 * PIECE),
            forward=forwards(self.code, layouts, before, after, self.counted),
        )
        self.step, self.block = self.trainer.step, bytes(block[:used])
        assert digests == piece_digests(self.payloads[self.step], PIECE)

    @property
    def is_right(self) -> bool:
        return self.block == self.payloads[self.trainer.step]


def held(seed: int = 0, experts: int = 2) -> Replica:
    """A replica of a trainer that has done one step."""
    replica = Replica(Trainer(experts=experts, seed=seed))
    replica.train(set(range(experts)))
    replica.build()
    return replica


@pytest.mark.parametrize("seed", range(3))
def test_a_replica_is_brought_forward_from_gradients(seed: int) -> None:
    replica = held(seed)
    for _ in range(4):
        replica.train({0, 1})
        replica.bring_forward()
        assert replica.is_right
        dense = 16_000 + 100
        # Rounded up to pieces: the dense tensor, the extras, the gradients and recipes.
        assert replica.sent_bytes <= dense + 2 * GRADIENT_BYTES + 6 * PIECE
        assert replica.sent_bytes < 0.4 * 2 * STATE_BYTES
    assert (replica.counted.units, replica.counted.pieces_differed) == (8, 0)
    assert replica.counted.nbytes >= 8 * STATE_BYTES


def test_an_expert_that_was_not_captured_is_left_as_it_is() -> None:
    replica = held()
    replica.train({1})
    replica.bring_forward()
    assert replica.is_right and replica.counted.units == 1


@pytest.mark.parametrize("wrong", [{"lr": 2e-3}, {"lr": -1.0}, {"lr": 1e300}])
def test_a_wrong_recipe_is_found_and_the_pieces_are_fetched(wrong: dict[str, float]) -> None:
    replica = held()
    replica.train({0, 1}, **wrong)
    replica.bring_forward()
    assert replica.is_right
    assert replica.counted.pieces_differed >= 2 * (6 * COUNT // PIECE)  # master and weights
    assert replica.counted.nbytes >= 2 * 6 * COUNT  # the moments do not depend on the rate


@pytest.mark.parametrize("bit", [0, 9, 15])
def test_a_flipped_gradient_is_found_and_what_it_spoilt_is_fetched(bit: int) -> None:
    replica = held()
    payload = bytearray(replica.trainer.train({0, 1}))
    at = replica.trainer.at("w1:gradient").offset + 2 * 777
    payload[at + bit // 8] ^= 1 << bit % 8
    replica.payloads[replica.trainer.step] = bytes(payload)
    replica.bring_forward()
    assert replica.is_right
    # One element: a piece of each moment, of the master and, where it is rounded, of the weights.
    assert 1 <= replica.counted.pieces_differed <= 4


def test_a_replica_of_another_generation_takes_the_state() -> None:
    replica = held()
    replica.train({0, 1})  # was not protected
    replica.train({0, 1})
    replica.bring_forward()
    assert replica.is_right and replica.counted.units == 0
    assert replica.sent_bytes > 2 * STATE_BYTES


def test_a_recipe_that_starts_elsewhere_is_not_followed() -> None:
    replica = held()
    replica.train({0, 1}, base_step=0)
    replica.bring_forward()
    assert replica.is_right and replica.counted.units == 0


def test_bytes_that_are_no_recipe_are_not_followed() -> None:
    replica = held()
    payload = bytearray(replica.trainer.train({0, 1}))
    for i, junk in enumerate((b"{" * 512, bytes(512))):
        at = replica.trainer.at(f"w{i}:recipe")
        payload[at.offset : at.offset + at.nbytes] = junk
    replica.payloads[replica.trainer.step] = bytes(payload)
    replica.bring_forward()
    assert replica.is_right and replica.counted.units == 0


def test_pieces_that_a_wrong_recipe_would_change_stay_as_they_are() -> None:
    """Its gradient is new, and its state the old one: the step was not done."""
    replica = held()
    old = replica.payloads[1]
    payload = bytearray(replica.trainer.train({0, 1}))
    at, end = replica.trainer.at("w0").offset, replica.trainer.at("w0:gradient").offset
    payload[at:end] = old[at:end]
    replica.payloads[2] = bytes(payload)
    replica.bring_forward()
    assert replica.is_right and replica.counted.units == 1


def test_parity_is_never_computed() -> None:
    layout = {0: encode_layout(Trainer().layout)}
    assert forwards(Code(3, 2, 1), layout, {}, {}, Recomputed()) == {}


def test_work_of_an_ended_epoch_gives_up() -> None:
    replica = held()
    replica.train({0, 1})

    def ended() -> None:
        if replica.sent_bytes >= GRADIENT_BYTES:
            raise StaleEpochError("ended")

    with pytest.raises(StaleEpochError):
        replica.bring_forward(ended)


def test_what_torch_rounds_is_what_is_compared() -> None:
    """The helper's payload is torch's: this test fails when the helper computes for itself."""
    trainer = Trainer(experts=1)
    payload = trainer.train({0})
    at = trainer.at("w0")
    found = torch.frombuffer(
        bytearray(payload[at.offset : at.offset + at.nbytes]), dtype=torch.bfloat16
    )
    assert torch.equal(found, trainer.masters[0].detach().bfloat16())


def test_units_that_share_a_piece_do_not_spoil_each_other() -> None:
    trainer = Trainer()
    layout = trainer.layout
    shift = trainer.at("w1").offset - trainer.at("w0:step").offset - 64  # into the piece of w0:step
    state = [e for e in layout.entries if e.role not in BESIDE_STATE]
    moved = [e for e in state if e.unit == "layer0/expert1"]
    entries = [e for e in state if e not in moved]
    entries += [structs.replace(e, offset=e.offset - shift) for e in moved]
    for beside in (e for e in layout.entries if e.role in BESIDE_STATE):
        end = entries[-1].offset + entries[-1].nbytes
        entries.append(structs.replace(beside, offset=round_up(end, PIECE)))
    extras = round_up(entries[-1].offset + entries[-1].nbytes, PIECE)
    trainer.layout = replace(layout, entries=tuple(entries), extras_offset=extras)
    trainer.payload = bytearray(extras + 100)
    assert trainer.at("w0:step").offset // PIECE == trainer.at("w1").offset // PIECE
    replica = Replica(trainer)
    replica.train({0, 1})
    replica.build()
    for wrong in (None, 0, 1):
        replica.train({0, 1})
        if wrong is not None:
            at = trainer.at(f"w{wrong}:recipe")
            payload = bytearray(replica.payloads[trainer.step])
            text = bytes(payload[at.offset : at.offset + at.nbytes])
            payload[at.offset : at.offset + at.nbytes] = text.replace(b"0.95", b"0.25")
            replica.payloads[trainer.step] = bytes(payload)
        replica.bring_forward()
        assert replica.is_right
        assert (replica.counted.pieces_differed == 0) == (wrong is None)
    assert replica.counted.units == 3 * 2


def test_a_gradient_that_shares_a_piece_with_state_is_not_used() -> None:
    trainer = Trainer()
    layout = trainer.layout
    last = trainer.at("w1:step")
    entries = [
        structs.replace(e, offset=last.offset + 64) if e.tensor == "w1:gradient" else e
        for e in layout.entries
    ]
    trainer.layout = replace(layout, entries=tuple(entries))
    replica = Replica(trainer)
    replica.train({0, 1})
    replica.build()
    replica.train({0, 1})
    replica.bring_forward()
    assert replica.is_right and replica.counted.units == 1


def test_a_payload_that_ends_before_its_tensors_do_is_not_computed() -> None:
    replica = held()
    replica.train({0, 1})
    layouts = {0: encode_layout(replica.trainer.layout)}
    short = replace(replica.manifest(2), payload_bytes=PIECE, digests=bytes(8))
    both = {0: replica.manifest(1)}, {0: short}
    (forward,) = forwards(replica.code, layouts, *both, replica.counted).values()
    assert forward.withheld(range(40)) == frozenset()
