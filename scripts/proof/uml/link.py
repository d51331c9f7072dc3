"""How the guest program and one of its processes talk: JSON lines over two socket pairs, one of them for held operations."""

from __future__ import annotations

import json
import select
import socket
from typing import Any


class End:
    """One end of a socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = b""

    def fileno(self) -> int:
        return self._sock.fileno()

    def say(self, **event: Any) -> None:
        self._sock.sendall(json.dumps(event).encode() + b"\n")

    def hear(self) -> dict[str, Any] | None:
        """The next event, waited for; None when the other side is gone."""
        while b"\n" not in self._buffer:
            data = self._sock.recv(65536)
            if not data:
                return None
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\n")
        value = json.loads(text)
        assert isinstance(value, dict)
        return value

    @property
    def waiting(self) -> bool:
        """Whether ``hear`` would not wait."""
        return b"\n" in self._buffer or bool(select.select([self._sock], [], [], 0)[0])

    def close(self) -> None:
        self._sock.close()


def pair() -> tuple[End, End]:
    one, other = socket.socketpair()
    return End(one), End(other)
