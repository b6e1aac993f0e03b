"""`Stopper`: holds a thread of another process right before it has the kernel reach into a process.

A rank may be stopped at any instruction. The worst one is the system call that reads or writes another
rank's memory: the rank has looked whether it may by then. ptrace(2) stops it there, each time.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading

_SEIZE, _INTERRUPT, _SYSCALL, _DETACH, _SYSCALL_INFO = 0x4206, 0x4207, 24, 17, 0x420E
_MARK_SYSCALLS = 1  # stops at system calls are told from signals
_AT_SYSCALL = signal.SIGTRAP | 0x80
_ENTRY, _NUMBER_AT = 1, 24
_ANY_THREAD = 0x40000000
_REACHING = (
    {310, 311} if os.uname().machine == "x86_64" else {270, 271}
)  # process_vm_readv, process_vm_writev

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, tid: int, address: int = 0, data: int = 0) -> None:
    if _libc.ptrace(request, tid, address, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace({request:#x}): {os.strerror(number)}")


class Stopper:
    """Watches one thread of another process, from a thread of its own, as ptrace wants it.

    Args:
        tid: The thread.
        moment: Before which of these system calls it is held: the first is number 1.

    Raises:
        OSError: It may not be traced.
    """

    def __init__(self, tid: int, moment: int) -> None:
        self._tid = tid
        self._moment = moment
        self._begun = threading.Event()
        self._held = threading.Event()
        self._let_go = threading.Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._begun.wait()
        if self._error is not None:
            raise self._error

    @property
    def holds(self) -> bool:
        """Whether the thread has come to the system call."""
        return self._held.is_set()

    def let_go(self) -> None:
        """Have the thread go on, now or at its next system call."""
        self._let_go.set()

    def join(self) -> None:
        """Wait until nothing is traced any more, which takes a system call of the thread."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            _ptrace(_SEIZE, self._tid, data=_MARK_SYSCALLS)
            _ptrace(_INTERRUPT, self._tid)
            status = self._wait()
            self._begun.set()
            self._trace(status)
        except OSError as error:
            self._error = error
            self._begun.set()

    def _trace(self, status: int) -> None:
        seen = 0
        while True:
            signalled = 0
            if os.WSTOPSIG(status) == _AT_SYSCALL:
                seen += self._reaches()
            elif status >> 16 == 0:
                signalled = os.WSTOPSIG(status)
            if seen == self._moment and not self._held.is_set():
                self._held.set()
                self._let_go.wait()
            if self._let_go.is_set():
                _ptrace(_DETACH, self._tid, data=signalled)
                return
            _ptrace(_SYSCALL, self._tid, data=signalled)
            status = self._wait()

    def _wait(self) -> int:
        _, status = os.waitpid(self._tid, _ANY_THREAD)
        if not os.WIFSTOPPED(status):
            raise ChildProcessError(f"thread {self._tid} has ended")
        return status

    def _reaches(self) -> bool:
        """Whether the thread is about to reach into a process."""
        info = ctypes.create_string_buffer(128)
        _ptrace(_SYSCALL_INFO, self._tid, len(info), ctypes.addressof(info))
        number = int.from_bytes(info.raw[_NUMBER_AT : _NUMBER_AT + 8], "little")
        return info.raw[0] == _ENTRY and number in _REACHING
