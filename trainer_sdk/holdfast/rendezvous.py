"""Entry point of the rendezvous backend `holdfast` for torchrun.

torchrun loads this module while it imports its own rendezvous package, whether or not the backend
is used, so it must import next to nothing. The backend itself is in `_launch.rendezvous`.

torchrun's own agent counts restarts differently on each node, and workers that find their store
through it derive its keys from that count. `holdfast.launch` starts an agent that counts epochs
instead; use it rather than `torchrun --rdzv-backend holdfast` where nodes can be replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters

    from holdfast._launch.rendezvous import HoldfastRendezvous


def create_handler() -> Callable[[RendezvousParameters], HoldfastRendezvous]:
    """Return the function that makes a handler. torchrun's registry calls this once."""
    return handler_of


def handler_of(params: RendezvousParameters) -> HoldfastRendezvous:
    """Handler for `--rdzv-backend holdfast --rdzv-endpoint SOCKET --rdzv-id JOB`.

    Raises:
        ValueError: when the endpoint is missing.
    """
    # `_launch.rendezvous` needs the package of torch that loads this module.
    from holdfast._environment import read_token_file  # noqa: PLC0415
    from holdfast._launch.rendezvous import GrpcDaemon, HoldfastRendezvous  # noqa: PLC0415

    if not params.endpoint:
        raise ValueError(
            "--rdzv-endpoint is missing; give the path of the daemon's socket, as in "
            "--rdzv-endpoint /run/holdfast/daemon.sock"
        )
    daemon = GrpcDaemon(Path(params.endpoint), params.run_id, read_token_file())
    return HoldfastRendezvous(daemon, params.run_id)
