"""Shape of a job: everything that determines the layout of its snapshots and parity. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.snapshots.membership import Redundancy

_TEXT = re.compile(
    r"(?P<nodes>[0-9]{1,9}) nodes of (?P<nproc_per_node>[0-9]{1,9}), "
    r"dp (?P<dp>[0-9]{1,9}) tp (?P<tp>[0-9]{1,9}) pp (?P<pp>[0-9]{1,9}) ep (?P<ep>[0-9]{1,9}), "
    rf"(?P<redundancy>{'|'.join(Redundancy)})( in groups of (?P<group_size>[0-9]{{1,9}}))?"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Shape of a job; snapshots of one shape cannot be restored in another."""

    nodes: int
    nproc_per_node: int
    dp: int
    tp: int
    pp: int
    ep: int
    redundancy: Redundancy
    group_size: int | None = None
    """Members of a parity group, where the job chooses them; else None."""

    @classmethod
    def of(cls, job: MoETrainingJob) -> Shape:
        """Shape that `job` asks for."""
        spec, p = job.spec, job.spec.parallelism
        is_grouped = spec.redundancy.raim5 is not None or spec.redundancy.losses > 1
        return cls(
            nodes=spec.nodes,
            nproc_per_node=spec.nproc_per_node,
            dp=p.dp,
            tp=p.tp,
            pp=p.pp,
            ep=p.ep,
            redundancy=spec.redundancy.type,
            group_size=job.group_size if is_grouped else None,
        )

    @classmethod
    def parse(cls, text: str) -> Shape | None:
        """Shape in the words of `str`, which control loops once stored instead of its fields; None
        for other words."""
        found = _TEXT.fullmatch(text)
        if found is None:
            return None
        words = found.groupdict()
        redundancy, group_size = Redundancy(words.pop("redundancy")), words.pop("group_size")
        numbers = {name: int(number) for name, number in words.items()}
        return cls(
            **numbers, redundancy=redundancy, group_size=int(group_size) if group_size else None
        )

    def __str__(self) -> str:
        groups = f" in groups of {self.group_size}" if self.group_size is not None else ""
        return (
            f"{self.nodes} nodes of {self.nproc_per_node}, "
            f"dp {self.dp} tp {self.tp} pp {self.pp} ep {self.ep}, {self.redundancy.value}{groups}"
        )
