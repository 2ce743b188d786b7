"""The part of a `MoETrainingJob` about how often snapshots are taken, and how often failures are
expected."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from holdfast_core.job.documents import Document

AUTO = "auto"
"""Value in place of a number of steps: the trainer finds the interval."""

_MeanDays = Annotated[float, Meta(gt=0, le=1_000_000)]


class StepInterval(Document, frozen=True, kw_only=True):
    """How often snapshots are taken."""

    steps: (
        Annotated[
            str,
            Meta(
                max_length=32,
                description="the number of steps from one snapshot to the next",
                examples=[1],
                extra={
                    "more": "A number states the interval that the training loop keeps to. auto: "
                    "of the saves that the loop calls, only as many are taken as lose the "
                    "least time overall, given the measured cost of a save and the "
                    "expected number of recoveries (REFT eq. 9)."
                },
            ),
        ]
        | int
    ) = 1
    node_mtbf_days: Annotated[
        _MeanDays,
        Meta(
            description="the mean number of days until a node is lost",
            examples=[180],
            extra={"more": "auto and `holdfast plan` calculate with it."},
        ),
    ] = 180.0
    process_mtbf_days: Annotated[
        _MeanDays,
        Meta(
            description="the mean number of days until the processes of a node fail",
            examples=[60],
            extra={"more": "auto and `holdfast plan` calculate with it."},
        ),
    ] = 60.0

    @property
    def auto(self) -> bool:
        """Whether the trainer finds the interval."""
        return self.steps == AUTO

    def asked_steps(self, found: int) -> int:
        """Steps from one call of `save` that is to be taken to the next: the job's, or those that
        `auto` has `found`."""
        return self.steps if isinstance(self.steps, int) else found

    @property
    def least_steps(self) -> int:
        """Fewest steps from snapshot to snapshot that a plan may choose for the job."""
        return self.steps if isinstance(self.steps, int) else 1
