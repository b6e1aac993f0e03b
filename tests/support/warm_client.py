"""Stands for a program that runs in a fork of a warm interpreter, see `warm_interpreter`.

    python -I -S warm_client.py SOCKET (-c CODE | -m MODULE | SCRIPT) ARGUMENT...

The program gets this process's descriptors, environment, folder, processors and signals; this process ends as
the program does. If this process is killed, so is the program.
"""

import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def inherited() -> list[int]:
    """Return the descriptors that a program in place of this one would have, standard streams apart."""
    fds = map(int, os.listdir("/proc/self/fd"))  # noqa: PTH208 - pathlib takes as long as all the rest
    return [fd for fd in fds if fd > 2 and is_inherited(fd)]


def is_inherited(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False  # the one by which the folder was read


def main() -> None:
    """Ask for the program, forward signals to it, and end as it does."""
    descriptors = inherited()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(sys.argv[1])
    for number in FORWARDED:
        signal.signal(number, lambda number, frame: connection.send(bytes([number])))
    folder = os.getcwd()  # noqa: PTH109 - as above
    request = {
        "arguments": sys.argv[2:],
        "environment": dict(os.environ),
        "folder": folder,
        "descriptors": descriptors,
        "processors": list(os.sched_getaffinity(0)),
    }
    text = os.memfd_create("request")
    os.write(text, json.dumps(request).encode())
    socket.send_fds(connection, [b"."], [0, 1, 2, text, *descriptors])
    answer = connection.recv(8)  # one status, as waitpid(2) has it
    status = int.from_bytes(answer, "little") if answer else 1 << 8
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) in FORWARDED:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


main()
