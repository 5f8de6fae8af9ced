"""The load generator that a campaign's `client` section asks for."""

from __future__ import annotations

from breakeven.lab.campaign import Client
from breakeven.lab.client.ray_backend import RayClient
from breakeven.lab.client.types import LoadBackend
from breakeven.lab.client.workers import LoadClient


def make_client(config: Client) -> LoadBackend:
    """Starts the workers. WorkerError where they cannot be started, with what to do."""
    if config.backend == "ray":
        return RayClient(config.workers, config.address)
    return LoadClient(config.workers)
