"""A transfer server that listens only as long as the run's own workers have to find it.

The server of `jax.experimental.transfer` knows no authentication: whoever reaches its ports may
pull an array whose identifier he knows, and bytes that it cannot read end the process, inside XLA.
So it listens on one address, the identifiers cannot be guessed, and once all workers of the run are
connected it listens no more.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

from jax.experimental import transfer

LOOPBACK = "127.0.0.1"
"""Where servers listen whose peers are all on their own host."""

SECRET_BYTES = 32
"""The length of a run's secret."""


def transfer_identifier(secret: bytes, *numbers: int) -> int:
    """An identifier of a transfer that nobody can guess who does not have the secret.

    Args:
        secret: what only the workers of the run have.
        numbers: what tells the transfer from all others.

    Returns:
        A number of 64 bits: a keyed hash.

    Example:
        >>> transfer_identifier(b"secret", 7, 1) == transfer_identifier(b"secret", 7, 1)
        True
        >>> transfer_identifier(b"secret", 7, 1) == transfer_identifier(b"another", 7, 1)
        False
    """
    message = struct.pack(f"<{len(numbers)}Q", *numbers)
    return int.from_bytes(blake2b(message, digest_size=8, key=secret).digest(), "little")


class ListeningServer:
    """A transfer server, which can be told to listen no more.

    Args:
        client: the client of the devices whose arrays it moves.
        host: the only address that it listens on.

    Attributes:
        server: the server.
    """

    def __init__(self, client: Any, host: str):
        before = set(_listening())
        self.server = transfer.start_transfer_server(client, f"{host}:0", [f"{host}:0"])
        addresses = {number: each for number, each in _listening() if (number, each) not in before}
        self._sockets = {n: each for n, each in addresses.items() if each[0] == host.strip("[]")}

    def stop_listening(self) -> None:
        """Accept no connection from now on; those that are there stay.

        The system refuses connections from the server's next transfer on, when its loop lets go of
        the sockets; until then they are never read.
        """
        # The server has no call for it. What takes the place of a listening socket never becomes
        # ready, so that the server's loop waits for it as it did for connections.
        never = os.eventfd(0)
        for number in self._sockets:
            os.dup2(never, number, inheritable=False)
        os.close(never)
        self._sockets = {}


def _listening() -> Iterator[tuple[int, tuple[str, int]]]:
    """The descriptors and the addresses of this process's sockets that listen for TCP."""
    if not os.path.isdir("/proc/self/fd"):
        return
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:  # It has been closed meanwhile.
            continue
        if not stat.S_ISSOCK(os.fstat(copy).st_mode):
            os.close(copy)
            continue
        with socket.socket(fileno=copy) as found:
            is_internet = found.family in (socket.AF_INET, socket.AF_INET6)
            if is_internet and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield int(name), found.getsockname()[:2]
