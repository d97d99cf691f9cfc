"""What keeps a run's transfers its own: where servers listen, and names that nobody can guess.

The server of `jax.experimental.transfer` knows no authentication: whoever reaches its ports may
pull an array whose identifier he knows, and bytes that it cannot read end the process, inside XLA.
So it listens on one address, the identifiers cannot be guessed, and once all workers of the run are
connected it listens no more; see `hetjax._compat.ListeningServer`.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

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
