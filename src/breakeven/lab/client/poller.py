"""Waiting for sockets: plain epoll where the system has it, `selectors` elsewhere, behind one small interface."""

from __future__ import annotations

import select
import selectors
from collections.abc import Sequence
from typing import Protocol

READ = 1  # the values of EPOLLIN and EPOLLOUT, so that an epoll object is a Poller as it is
WRITE = 4


class Poller(Protocol):
    """What the load generator needs of epoll. Masks are READ, WRITE or both; other bits mean error or hang-up."""

    def register(self, fd: int, eventmask: int, /) -> None: ...
    def modify(self, fd: int, eventmask: int, /) -> None: ...
    def unregister(self, fd: int, /) -> None: ...
    def poll(self, timeout: float | None = None, /) -> Sequence[tuple[int, int]]: ...
    def close(self) -> None: ...


class SelectorPoller:
    """The same through `selectors` (kqueue, poll or select)."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    @staticmethod
    def _events(mask: int) -> int:
        return (selectors.EVENT_READ if mask & READ else 0) | (selectors.EVENT_WRITE if mask & WRITE else 0)

    def register(self, fd: int, eventmask: int, /) -> None:
        self._selector.register(fd, self._events(eventmask))

    def modify(self, fd: int, eventmask: int, /) -> None:
        self._selector.modify(fd, self._events(eventmask))

    def unregister(self, fd: int, /) -> None:
        self._selector.unregister(fd)

    def poll(self, timeout: float | None = None, /) -> list[tuple[int, int]]:
        return [
            (key.fd, (READ if events & selectors.EVENT_READ else 0) | (WRITE if events & selectors.EVENT_WRITE else 0))
            for key, events in self._selector.select(timeout)
        ]

    def close(self) -> None:
        self._selector.close()


def make_poller() -> Poller:
    """The cheapest poller of this system."""
    if hasattr(select, "epoll"):
        return select.epoll()
    return SelectorPoller()
