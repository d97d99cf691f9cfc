"""One end of the pulls that `bench_pulls.py` times: a process with JAX's transfer servers."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from benchmarking import RequestServer, serve_until_end
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding


class Server(RequestServer):
    """What is asked of the process.

    Args:
        host: the address that it listens on.
        apart: whether each partner has a server of its own.
    """

    def __init__(self, host: str, apart: bool):
        self._host, self._apart = host, apart
        self._device = jax.devices()[0]
        self._servers: dict[str, Any] = {}
        self._connections: dict[str, Any] = {}

    def _server(self, partner: str) -> Any:
        key = partner if self._apart else ""
        if key not in self._servers:
            address = f"{self._host}:0"
            client = self._device.client
            self._servers[key] = transfer.start_transfer_server(client, address, [address])
        return self._servers[key]

    def do_offer(self, to: str, num_bytes: int, numbers: Sequence[int]) -> str:
        """Offer arrays to a partner, by number; where they are pulled from."""
        array = jax.device_put(np.zeros(num_bytes, np.uint8), self._device)
        for number in numbers:
            self._server(to).await_pull(number, [array])
        return self._server(to).address()

    def do_connect(self, to: str, address: str) -> None:
        """Connect to a partner."""
        self._connections[to] = self._server(to).connect(address)

    def _pulled(self, source: str, number: int, num_bytes: int) -> list[jax.Array]:
        sharding = SingleDeviceSharding(self._device)
        shape = jax.ShapeDtypeStruct((num_bytes,), np.uint8, sharding=sharding)
        return self._connections[source].pull(number, [shape])

    def do_pull(
        self, source: str, number: int, num_bytes: int, beside: Sequence[Any] | None = None
    ) -> float:
        """Pull an array, beside another one that is still coming; the seconds until it is there."""
        other = None
        if beside is not None:
            other = self._pulled(*beside)
            time.sleep(0.02)
        start = time.perf_counter()
        jax.block_until_ready(self._pulled(source, number, num_bytes))
        seconds = time.perf_counter() - start
        jax.block_until_ready(other)
        return seconds

    def close(self) -> None:
        """Nothing to do: servers end with the process."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("host")
    parser.add_argument("--apart", action="store_true")
    options = parser.parse_args()
    serve_until_end(Server(options.host, options.apart))


if __name__ == "__main__":
    main()
