"""`holdfast-operator`: parses, wires, runs; or prepares its own removal.

Exit codes: 0 told to stop, 1 the Lease was lost, 2 it cannot start.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Sequence

from holdfast_core.errors import HoldfastError
from holdfast_operator._environment import given
from holdfast_operator.kube.api import connect
from holdfast_operator.kube.http import HttpServer
from holdfast_operator.kube.metrics import Metrics
from holdfast_operator.kube.operating import Operating
from holdfast_operator.kube.options import Options, parse
from holdfast_operator.kube.uninstalling import release_finalizers

EXIT_LEASE_LOST, EXIT_CANNOT_START = 1, 2

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until told to stop; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    leaving = arguments[:1] == ["release-finalizers"]
    options = parse(arguments[1:] if leaving else arguments, given())
    logging.basicConfig(level=options.log_level.upper(), format=_LOG_FORMAT, stream=sys.stderr)
    try:
        told = asyncio.run(_leave(options) if leaving else _run(options))
    except HoldfastError as error:
        print(f"holdfast-operator: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    return 0 if told else EXIT_LEASE_LOST


async def _run(options: Options) -> bool:
    metrics = Metrics()
    api = await connect(metrics, options.kubeconfig, options.context)
    operating = Operating(options, api, metrics, _stop_on_signals)
    http = HttpServer(metrics.registry, operating.health)
    try:
        await http.start(options.listen or "", options.http_port)
        return await operating.run()
    finally:
        await http.stop()
        await api.close()


async def _leave(options: Options) -> bool:
    api = await connect(Metrics(), options.kubeconfig, options.context)
    try:
        count = await release_finalizers(
            api,
            namespace=options.namespace,
            lease=options.lease,
            identity=options.identity,
            watch_namespace=options.watch_namespace,
            wall=time.time,
        )
    finally:
        await api.close()
    logging.info("%d jobs released; the operator may be removed", count)
    return True


def _stop_on_signals(operating: Operating) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, operating.stop)


if __name__ == "__main__":
    raise SystemExit(main())
