"""One end of a bare TCP stream between two hosts of `hosts.py`: the limit for messages of a size.

The sender hands whole tensors to a blocking socket and the receiver reads them into a tensor: no frames, no
interpreter in between worth mentioning. Unlike iperf3, which sends one buffer of 128 KiB again and again,
it reads and writes as much memory as the messages have.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import time

import torch
from hosts_rank import STREAM_MESSAGES

from dist2.backends.socket.memory import bytes_of


def receive(listener: socket.socket, sizes: list[int], rounds: int) -> None:
    """Take all messages; answer the last one of each round."""
    connection, _ = listener.accept()
    with connection:
        for nbytes in sizes:
            tensor = torch.ones(nbytes, dtype=torch.uint8)
            place = bytes_of(tensor)
            for _ in range((1 + rounds) * STREAM_MESSAGES):
                came = 0
                while came < nbytes:
                    came += connection.recv_into(place[came:])
                connection.sendall(b"!")


def send(address: tuple[str, int], sizes: list[int], rounds: int) -> dict[int, float]:
    """Return the median time of a round by size, in seconds."""
    found = {}
    with socket.create_connection(address) as connection:
        for nbytes in sizes:
            tensor, times = torch.ones(nbytes, dtype=torch.uint8), []
            data = bytes_of(tensor)
            for _ in range(1 + rounds):
                start = time.perf_counter()
                for _ in range(STREAM_MESSAGES):
                    connection.sendall(data)
                answers = 0
                while answers < STREAM_MESSAGES:
                    answers += len(connection.recv(STREAM_MESSAGES))
                times.append(time.perf_counter() - start)
            found[nbytes] = statistics.median(times[1:])  # the window grows at first
    return found


def main() -> None:
    """Receive; or send to the receiver and print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--to", type=int, default=0, help="the receiver's port")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.to:
        print(json.dumps(send((options.address, options.to), options.sizes, options.rounds)))
        return
    with socket.create_server((options.address, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        receive(listener, options.sizes, options.rounds)


if __name__ == "__main__":
    main()
