"""Serves `/metrics`, `/healthz` and `/readyz` from the operator's own event loop: when the loop is
stuck, probes get no answer, and so fail."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from holdfast_core.errors import UnreachableError
from holdfast_operator.kube.health import Health


class ProbeServer:
    """HTTP server for probes and metrics; listens from `start` to `stop`."""

    def __init__(self, registry: CollectorRegistry, health: Callable[[], Health]) -> None:
        self._registry, self._health = registry, health
        application = web.Application()
        application.router.add_get("/metrics", self._metrics)
        application.router.add_get("/healthz", self._healthz)
        application.router.add_get("/readyz", self._readyz)
        self._runner = web.AppRunner(application, access_log=None)

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port.

        Raises:
            UnreachableError: when it cannot listen on the address.
        """
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            raise UnreachableError(
                f"cannot listen on {host}:{port} for probes and metrics: {error}; give another "
                f"--http-port"
            ) from error
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": content_type})

    async def _healthz(self, request: web.Request) -> web.Response:
        return _answer(self._health().unwell())

    async def _readyz(self, request: web.Request) -> web.Response:
        return _answer(self._health().not_ready())


def _answer(problem: str) -> web.Response:
    return web.Response(status=503 if problem else 200, text=f"{problem or 'ok'}\n")
