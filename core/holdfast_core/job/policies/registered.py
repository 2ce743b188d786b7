"""The snapshot policies that a job can ask for: one line each.

Everything else follows: the parser's fields and rules, the resource, the documents, the rows of
`holdfast plan`, and the trainer's strategy.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

from holdfast_core.job.documents import Document
from holdfast_core.job.policies.full import Full
from holdfast_core.job.policies.partial_experts import PartialExperts
from holdfast_core.job.policies.policy import Policy
from holdfast_core.job.policies.selective import Selective
from holdfast_core.job.policies.sparse import SparseWindows


class PolicyType(StrEnum):
    """Which units a snapshot captures. A member's value is its policy's `type_name`."""

    policy: type[Policy]
    """Class of the policy, whose values have its settings."""

    def __new__(cls, policy: Any) -> Self:
        member = str.__new__(cls, policy.type_name)
        member._value_ = policy.type_name
        member.policy = policy
        return member

    FULL = Full
    PARTIAL_EXPERTS = PartialExperts
    SELECTIVE = Selective
    SPARSE = SparseWindows


def _explained() -> str:
    """What each type captures."""
    sentences = [f"{kind.value}: {kind.policy.captures}." for kind in PolicyType]
    lossy = [kind.value for kind in PolicyType if kind.policy.leaves_experts_out]
    return (
        f"{' '.join(sentences)} After a recovery with {' or '.join(lossy)}, experts that were left "
        f"out are as old as their last snapshot; lost tokens are counted."
    )


_SETTINGS: Any = msgspec.defstruct(
    "_Settings",
    [
        (
            "type",
            Annotated[
                PolicyType,
                Meta(description="which units a snapshot captures", extra={"more": _explained()}),
            ],
            PolicyType.FULL,
        ),
        *(
            (kind.name.lower(), kind.policy | None, None)
            for kind in PolicyType
            if kind.policy.has_fields()
        ),
    ],
    bases=(Document,),
    frozen=True,
    kw_only=True,
    rename={kind.name.lower(): kind.policy.field_name() for kind in PolicyType},
)
"""The type of a policy, and a field for the settings of each."""


class PolicySpec(_SETTINGS):  # type: ignore[misc]  # a field for each policy
    """What a snapshot contains."""

    @property
    def chosen(self) -> Policy:
        """The policy that is asked for, with its settings."""
        kind = PolicyType(self.type)
        given: Policy | None = getattr(self, kind.name.lower(), None)
        return kind.policy() if given is None else given

    @property
    def leaves_experts_out(self) -> bool:
        """Whether recoveries can lose tokens."""
        return self.chosen.leaves_experts_out
