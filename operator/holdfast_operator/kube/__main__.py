"""`holdfast-operator`: parses the command line, wires the operator and runs it, or prepares its
removal.

Exit codes: 0 stopped on request, 1 the Lease was lost, 2 it cannot start.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from holdfast_core.errors import HoldfastError
from holdfast_operator._environment import given
from holdfast_operator.kube.client.api import connect
from holdfast_operator.kube.http import ProbeServer
from holdfast_operator.kube.metrics import OperatorMetrics
from holdfast_operator.kube.operating import OperatorReplica
from holdfast_operator.kube.options import Options, parse
from holdfast_operator.kube.upgrade.uninstalling import release_finalizers
from holdfast_protos.connections.identity import choose
from holdfast_protos.connections.identity_gauges import show_identity

EXIT_LEASE_LOST, EXIT_CANNOT_START = 1, 2

YOUNG_OBJECTS_MAX = 100_000
"""Number of new objects after which the garbage collector runs."""

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until stopped; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    leaving = arguments[:1] == ["release-finalizers"]
    options = parse(arguments[1:] if leaving else arguments, given())
    logging.basicConfig(level=options.log_level.upper(), format=_LOG_FORMAT, stream=sys.stderr)
    try:
        done = asyncio.run(_leave(options) if leaving else _run(options))
    except HoldfastError as error:
        print(f"holdfast-operator: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    return 0 if done else EXIT_LEASE_LOST


def _spare_collector() -> None:
    """Keep the garbage collector from running often, and from searching what was imported.

    One look at a job of thousands of members makes tens of thousands of objects, hardly any of them
    in a cycle. With Python's defaults, the collector would search those and everything imported
    again and again, which took longer than the look.
    """
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX, *gc.get_threshold()[1:])


async def _run(options: Options) -> bool:
    _spare_collector()
    identity = choose(options.tls, options.tls_domain, insecure=options.insecure)
    metrics = OperatorMetrics()
    show_identity(identity, metrics)
    async with AsyncExitStack() as stack:
        api, lease_api = [
            await connect(metrics, options.kubeconfig, options.context) for _ in range(2)
        ]
        stack.push_async_callback(api.close)
        stack.push_async_callback(lease_api.close)
        operating = OperatorReplica(options, api, lease_api, metrics, identity, _stop_on_signals)
        http = ProbeServer(metrics.registry, operating.health)
        stack.push_async_callback(http.stop)
        await http.start(options.listen or "", options.http_port)
        return await operating.run()


async def _leave(options: Options) -> bool:
    api = await connect(OperatorMetrics(), options.kubeconfig, options.context)
    try:
        count = await release_finalizers(
            api,
            namespace=options.namespace,
            lease=options.lease,
            identity=options.identity,
            watch_namespaces=options.watch_namespaces,
            wall=time.time,
        )
    finally:
        await api.close()
    logging.info("%d jobs released; the operator may be removed", count)
    return True


def _stop_on_signals(operating: OperatorReplica) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, operating.stop)


if __name__ == "__main__":
    raise SystemExit(main())
