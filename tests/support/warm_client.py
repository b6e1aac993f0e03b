"""Stands for a program that runs in a fork of a warm interpreter, see `warm_interpreter`.

    python -I -S warm_client.py SOCKET (-c CODE | -m MODULE | SCRIPT) ARGUMENT...

The program gets this process's standard streams, environment, folder and signals; this process ends as the
program does. If this process is killed, so is the program.
"""

import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Ask for the program, forward signals to it, and end as it does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(sys.argv[1])
    for number in FORWARDED:
        signal.signal(number, lambda number, frame: connection.send(bytes([number])))
    folder = os.getcwd()  # noqa: PTH109 - to import pathlib takes as long as all the rest
    request = {"arguments": sys.argv[2:], "environment": dict(os.environ), "folder": folder}
    text = os.memfd_create("request")
    os.write(text, json.dumps(request).encode())
    socket.send_fds(connection, [b"."], [0, 1, 2, text])
    answer = connection.recv(8)  # one status, as waitpid(2) has it
    status = int.from_bytes(answer, "little") if answer else 1 << 8
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) in FORWARDED:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


main()
