"""The durable tier of a world that `chaos` breaks: its real files, its troubles, and what must hold
for the sets in it.

Daemons see a tier that fails, stalls and is away; the methods here look past all that.
"""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import versitygw
from fault_proxy import Fault, FaultProxy, Request
from faulty_storage import Access, Trouble

from holdfast_core.durable.sets import LATEST_FILE, MANIFEST_FILE, decode_latest, set_name
from holdfast_core.errors import CorruptError, StorageError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Tier
from holdfast_storage.local import LocalRoot
from holdfast_storage.sets import SetStore

DIRECTORY, OBJECTS = "a directory", "object storage"
EVERY_STEPS, KEEP = 2, 4
READ_TIMEOUT_S = 2.0
LOOKS = 5
"""At sets that are cleaned up while they are looked at."""

WRONG = "wrong bytes in storage"

ERRORS = (
    (errno.EIO,),
    (errno.ENOSPC,),
    (errno.ESTALE, errno.ETIMEDOUT),
    (errno.EROFS,),
)
ANSWERS = (
    Fault.ERROR_500,
    Fault.ERROR_503,
    Fault.DROPPED,
    Fault.LOST_ANSWER,
    Fault.HALF_ANSWER,
)

Content = Callable[[int, Generation], bytes]
"""What a rank captured in a generation."""


@dataclass(slots=True)
class ChaosTier:
    """One world's tier."""

    job: str
    real: Path
    """Where its bytes lie, whatever daemons are shown."""
    tier: Tier
    access: Access
    proxy: FaultProxy | None = None
    """Before object storage; a directory does without."""
    spoiled: set[Generation] = field(default_factory=set)
    """Sets of which a byte was changed."""
    seen: set[Generation] = field(default_factory=set)
    """Sets that were complete once, with all their bytes."""
    _counted: int = 0

    @classmethod
    def directory(cls, job: str, root: Path) -> ChaosTier:
        """A tier of files in `root`."""
        tier = Tier(uri=root.as_uri(), every_steps=EVERY_STEPS, keep=KEEP)
        return cls(job, root, tier, Access(trouble=root.parent / "trouble.json"))

    @classmethod
    def objects(cls, job: str, server: versitygw.S3Server, name: str) -> ChaosTier:
        """A tier of objects below the prefix `name` of `server`, which keeps them as files."""
        proxy = FaultProxy(server.port)
        uri = f"s3://{versitygw.BUCKET}/{name}"
        options = versitygw.options(proxy.port, read_timeout_s=READ_TIMEOUT_S)
        tier = Tier(uri=uri, every_steps=EVERY_STEPS, keep=KEEP)
        return cls(job, server.bucket / name, tier, Access(options=options), proxy)

    @property
    def kind(self) -> str:
        return DIRECTORY if self.proxy is None else OBJECTS

    def close(self) -> None:
        self.calm()
        if self.proxy is not None:
            self.proxy.close()

    # --- trouble ----------------------------------------------------------------------------------

    def fail(self, rng: random.Random, portion: float) -> str:
        """Let calls fail until `calm`; returns a description of how."""
        share = f"{portion:.0%} of the calls"
        if self.proxy is None:
            errnos = rng.choice(ERRORS)
            Trouble(errnos=errnos, portion=portion).write(self.access.trouble)
            return f"{share}: {' or '.join(errno.errorcode[number] for number in errnos)}"
        answer = rng.choice(ANSWERS)
        chance = random.Random(rng.random())
        self.proxy.play(lambda _: answer if chance.random() < portion else Fault.NONE)
        return f"{share}: {answer.name}"

    def slow_down(self, pause_s: float) -> None:
        """Let each call take `pause_s` seconds, until `calm`."""
        if self.proxy is None:
            Trouble(slow_s=pause_s).write(self.access.trouble)
            return

        def late(_: Request) -> Fault:
            threading.Event().wait(pause_s)
            return Fault.NONE

        self.proxy.play(late)

    def strike_request(self, wanted: Callable[[Request], bool], strike: Callable[[], None]) -> None:
        """Call `strike` once, when the server has carried out a wanted request and not yet
        answered."""
        assert self.proxy is not None
        left = [strike]

        def served(request: Request) -> None:
            if wanted(request) and left:
                left.pop()()

        self.proxy.play(lambda _: Fault.NONE, served)

    def calm(self) -> None:
        """End all trouble."""
        self.access.trouble.unlink(missing_ok=True)
        if self.proxy is not None:
            self.proxy.play(lambda _: Fault.NONE)

    # --- what must hold ---------------------------------------------------------------------------

    def complete(self) -> list[Generation]:
        """Sets that have a manifest and all files that it names, even if bytes were changed."""
        return [one.generation for one in self._store().complete()]

    def newest_sound(self) -> Generation | None:
        """The newest set that can be restored from here alone."""
        return max(self.sound(), default=None)

    def sound(self) -> list[Generation]:
        """Complete sets whose bytes were not changed."""
        return [generation for generation in self.complete() if generation not in self.spoiled]

    def wrong(self, content: Content) -> str:
        """Description of what is wrong with the sets that became complete since the last look;
        empty when every byte of them is as captured."""
        problem = ""
        for _ in range(LOOKS):
            try:
                problem = self._not_whole() or self._check_bytes(content)
            except (StorageError, CorruptError) as error:
                problem = f"a complete set cannot be read: {error}"
            if not problem or problem.startswith(WRONG):
                return problem
        return problem  # it was not that a set was cleaned up meanwhile

    def _not_whole(self) -> str:
        for rejected in self._store().complete().rejected:
            if rejected.generation not in self.spoiled:
                return f"a set has a manifest and is not whole: {rejected}"
        if (latest := self.latest()) is not None and latest not in self.complete():
            return "" if latest in self.spoiled else f"latest.json points to {latest}, not whole"
        return ""

    def latest(self) -> Generation | None:
        """The generation that the hint for people and tools names; None when there is no hint."""
        path = self.real / self.job / LATEST_FILE
        return decode_latest(path.read_bytes()) if path.exists() else None

    def _check_bytes(self, content: Content) -> str:
        store = self._store()
        for one in store.complete():
            if one.generation in self.seen | self.spoiled:
                continue
            for rank in range(one.world_size):
                stored = store.open_rank(one, rank)
                data = bytearray(stored.content.payload_bytes)
                stored.read_into(0, stored.pieces, memoryview(data))
                if data != content(rank, one.generation):
                    return f"{WRONG}: rank {rank} of set {one.generation}"
            self.seen.add(one.generation)
        return ""

    def take_count(self) -> int:
        """The number of sets found right since the last call."""
        count, self._counted = len(self.seen) - self._counted, len(self.seen)
        return count

    def flip(self, rng: random.Random) -> str:
        """Change a bit of a sound set, and leave two others sound; returns a description of it."""
        sound = sorted(self.sound(), reverse=True)
        if len(sound) < 3:
            return ""
        generation = sound[0] if rng.random() < 0.7 else rng.choice(sound)
        (directory,) = self.real.glob(f"{self.job}/{set_name(generation)}")
        pattern = MANIFEST_FILE if rng.random() < 0.25 else "rank-*.safetensors"
        path = rng.choice(sorted(directory.glob(pattern)))
        offset = rng.randrange(path.stat().st_size)
        self.spoiled.add(generation)
        with path.open("r+b") as file:
            file.seek(offset)
            (byte,) = file.read(1)
            file.seek(offset)
            file.write(bytes([byte ^ (1 << rng.randrange(8))]))
        return f"set {generation}, {path.name} at {offset}"

    def _store(self) -> SetStore:
        return SetStore(self.real.as_uri(), self.job, root=LocalRoot(self.real))
