"""Settings from the environment, read once into a frozen `Config`: the only reader of `os.environ`.

A variable that is empty counts as unset: launchers and job scripts often pass variables on that way. Names
that begin with ``DIST2_`` and are none of dist2's are most often misspelt, so each is logged once.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
import re
import tempfile
from collections.abc import Collection, Mapping
from typing import TypeVar

import attrs

from dist2.errors import InvalidUsageError
from dist2.runtime.process import started_in
from dist2.runtime.secret import Secret, read_secret

_T = TypeVar("_T")

log = logging.getLogger("dist2.runtime.config")

DEFAULT_TIMEOUT_S = 1800.0
"""As torch.distributed has it."""
DEFAULT_HEARTBEAT_S = 10.0
DEFAULT_WAITING_S = 5.0
DEFAULT_RECORDER_SIZE = 4096
DEFAULT_LOG_BYTES = 64 << 20
LEAST_LOG_BYTES = 1 << 20
LOOPBACK = "127.0.0.1"
MEMORY = "/dev/shm"
"""A folder in memory, which containers have whose file systems are all read-only."""
_LARGEST = 1e9
"""Numbers beyond (infinity among them) are this one."""
_ON_HANG = ("observe", "abort", "exit")
_TRANSPORTS = ("auto", "shm", "tcp", "inproc")
_SHOWN = re.compile(
    r"(DIST2|TORCH|PYTORCH|NCCL|RCCL|GLOO|UCX|FI|OMPI|PMIX?|MPICH|SLURM|RAY|PET|OMP|MKL|CUDA|HIP|ROCR|KUBERNETES)_"
    r"|(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT|HOSTNAME|TMPDIR|LD_PRELOAD)$"
)
"""Variables that are part of the evidence of a failure."""
_SECRET_WORDS = "SECRET|TOKEN|PASS|KEY|CRED|AUTH|COOKIE|JWT|SIGNATURE|BEARER"
_SECRET = re.compile(rf"{_SECRET_WORDS}|(?:^|_)PWD?(?:_|$)", re.IGNORECASE)
_URL_USER = re.compile(r"(?<=://)[^/@\s\"'\\]+(?=@)")
_CREDENTIALS = re.compile(
    rf"{_URL_USER.pattern}|--[\w-]*(?:{_SECRET_WORDS})|(?:{_SECRET_WORDS})[\w-]*[\"']?\s*[:=]|BEARER\s",
    re.IGNORECASE,
)
"""Values with a user and a password of a URL, an option, an assignment or a header of a secret."""
_SHOWN_CHARS = 500
_FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@attrs.frozen
class Config:
    """Settings of this process.

    Attributes:
        timeout_s: ``DIST2_TIMEOUT``: default limit of an operation, in seconds.
        host: ``DIST2_HOST``: address that data listeners bind and peers connect to. Default: loopback
            where the store is on loopback, else the local address that routes to the store.
        host_id: ``DIST2_HOST_ID``: ranks with equal ids share memory; default derived from the machine.
        transport: ``DIST2_TRANSPORT``: ``auto``, ``shm``, ``tcp`` or ``inproc``.
        job_id: ``DIST2_JOB_ID`` or torchrun's run id: connections of other jobs are refused.
        spin_us: ``DIST2_SPIN_US``: how long a waiter polls memory before it yields its core, in
            microseconds.
        heartbeat_s: ``DIST2_HEARTBEAT``: silence after which the ranks of another host count as dead, in
            seconds; at least 2.
        congestion: ``DIST2_CONGESTION``: congestion control of connections to near hosts where the system's
            is BBR, whose pacing is slower there; ``bbr`` keeps it.
        instruments: ``DIST2_INSTRUMENTS=0`` loads none of the default ones.
        tuning: ``DIST2_TUNING``: file of measured constants that rank 0 of a socket group reads
            (``benchmarks/tune.py`` writes one); by default dist2's own.
        recorder_size: ``DIST2_RECORDER_SIZE``: operations that the flight recorder keeps, a million at most.
        dump: ``DIST2_DUMP``: file to which each rank writes its flight recorder when a group breaks;
            ``{rank}`` in it stands for the rank.
        dump_signal: ``DIST2_DUMP_SIGNAL``: ``USR1`` or ``USR2``: it does so on that signal, too.
        operation_log: ``DIST2_OPERATION_LOG``: folder to which each process logs its operations. None: off.
        operation_log_bytes: ``DIST2_OPERATION_LOG_BYTES``: size of the files of a process there; at least
            `LEAST_LOG_BYTES`.
        dump_every_s: ``DIST2_DUMP_EVERY``: it does so again and again, with pauses of so many seconds.
        waiting_s: ``DIST2_WAITING``: an operation that takes longer counts as waiting for other ranks where a
            control plane runs, in seconds.
        control_plane: ``DIST2_CONTROL_PLANE``: starts the control plane with the first group: ``1``, an
            address to listen on, or a folder for Unix sockets. None: off.
        incidents: ``DIST2_INCIDENTS``: folder of incidents; ``0`` writes none. Default: a private folder
            among the temporary files of this user.
        on_hang: ``DIST2_ON_HANG``: what happens once a control plane has confirmed that the job waits:
            ``observe``, ``abort`` or ``exit``.
        control_token: ``DIST2_CONTROL_TOKEN``: token of the control planes, and of commands that ask them.
        allow_pickle: ``DIST2_ALLOW_PICKLE=1``: object collectives of `dist2.legacy` pickle and unpickle
            objects that the safe encoding refuses.
        secret: ``DIST2_SECRET``, or the content of the file ``DIST2_SECRET_FILE``: connections of processes
            that do not know it are refused.
        tls_cert: ``DIST2_TLS_CERT``: file with this process's certificate and its chain to the CA.
        tls_key: ``DIST2_TLS_KEY``: file with its private key.
        tls_ca: ``DIST2_TLS_CA``: file with the CA that signed the certificates of all members.
    """

    timeout_s: float = DEFAULT_TIMEOUT_S
    host: str | None = None
    host_id: str | None = None
    transport: str = "auto"
    job_id: str = ""
    spin_us: float | None = None
    heartbeat_s: float = DEFAULT_HEARTBEAT_S
    congestion: str = "reno"
    instruments: bool = True
    tuning: str | None = None
    recorder_size: int = DEFAULT_RECORDER_SIZE
    dump: str | None = None
    dump_signal: str | None = None
    dump_every_s: float | None = None
    operation_log: str | None = None
    operation_log_bytes: int = DEFAULT_LOG_BYTES
    waiting_s: float = DEFAULT_WAITING_S
    control_plane: str | None = None
    incidents: str | None = None
    on_hang: str = "observe"
    control_token: str | None = attrs.field(default=None, repr=False)
    allow_pickle: bool = False
    secret: Secret | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Config:
        """Read the settings.

        Raises:
            InvalidUsageError: A variable has a value that it cannot have.
        """
        if environment is os.environ:
            _warn_of_unknown(environment)
        environment = _without_empty(environment)
        get = environment.get
        return cls(
            timeout_s=_positive(environment, "DIST2_TIMEOUT", DEFAULT_TIMEOUT_S),
            host=get("DIST2_HOST"),
            host_id=get("DIST2_HOST_ID"),
            transport=_one_of(environment, "DIST2_TRANSPORT", _TRANSPORTS, "auto"),
            job_id=get("DIST2_JOB_ID") or get("TORCHELASTIC_RUN_ID", ""),
            spin_us=_positive(environment, "DIST2_SPIN_US", None),
            heartbeat_s=max(2.0, _positive(environment, "DIST2_HEARTBEAT", DEFAULT_HEARTBEAT_S)),
            congestion=get("DIST2_CONGESTION", "reno"),
            instruments=_flag(environment, "DIST2_INSTRUMENTS", True),
            tuning=get("DIST2_TUNING"),
            recorder_size=int(
                min(max(_positive(environment, "DIST2_RECORDER_SIZE", DEFAULT_RECORDER_SIZE), 1), 1 << 20)
            ),
            dump=_absolute(get("DIST2_DUMP")),
            dump_signal=_signal(environment, "DIST2_DUMP_SIGNAL"),
            dump_every_s=_positive(environment, "DIST2_DUMP_EVERY", None),
            operation_log=_absolute(get("DIST2_OPERATION_LOG")),
            operation_log_bytes=int(
                max(_positive(environment, "DIST2_OPERATION_LOG_BYTES", DEFAULT_LOG_BYTES), LEAST_LOG_BYTES)
            ),
            waiting_s=_positive(environment, "DIST2_WAITING", DEFAULT_WAITING_S),
            control_plane=_control_plane(environment),
            incidents=_incidents(environment),
            on_hang=_one_of(environment, "DIST2_ON_HANG", _ON_HANG, "observe"),
            control_token=get("DIST2_CONTROL_TOKEN"),
            allow_pickle=_flag(environment, "DIST2_ALLOW_PICKLE", False),
            secret=_secret(environment),
            **_tls_files(environment),
        )


VARIABLES = frozenset(
    {
        *(f"DIST2_{field.name.removesuffix('_s').upper()}" for field in attrs.fields(Config)),
        "DIST2_SECRET_FILE",
    }
)
"""All variables that are dist2's own."""


def environment_value(name: str) -> str | None:
    """Return a variable that launchers set (``RANK``, ``MASTER_ADDR``), or None."""
    return os.environ.get(name)


def environment_flag(name: str, default: bool) -> bool:
    """Return a variable that turns something on or off.

    Raises:
        InvalidUsageError: It has another value.
    """
    return _flag(_without_empty(os.environ), name, default)


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process that this one starts: its own with changes."""
    return {**os.environ, **changes}


def shown_environment() -> dict[str, str]:
    """Return the variables that concern a job, without values that may be secret."""
    return {
        name: "(hidden)" if _SECRET.search(name) or _CREDENTIALS.search(value) else value[:_SHOWN_CHARS]
        for name, value in sorted(os.environ.items())
        if _SHOWN.match(name)
    }


def without_url_users(text: str) -> str:
    """Return a text, such as that of an error, without the users and passwords of its URLs."""
    return _URL_USER.sub("(hidden)", text)


def set_environment(variables: Mapping[str, str]) -> None:
    """Set variables of this process, for launchers whose processes exist before their ranks are known."""
    os.environ.update(variables)


def _without_empty(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if value}


def own_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of dist2 that are set."""
    return {name: value for name, value in environment.items() if name in VARIABLES and value}


def unknown_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return names that begin with ``DIST2_`` and are none of dist2's; with the closest known name, or ""."""
    unknown = [name for name in environment if name.startswith("DIST2_") and name not in VARIABLES]
    known = sorted(VARIABLES)
    return {name: next(iter(difflib.get_close_matches(name, known, n=1)), "") for name in unknown}


def _warn_of_unknown(environment: Mapping[str, str]) -> None:
    for name, closest in unknown_variables(environment).items():
        _warn_once(name, closest)


@functools.cache
def _warn_once(name: str, closest: str) -> None:
    suggestion = f"; did you mean {closest}?" if closest else ""
    log.warning("unknown environment variable %s has no effect%s", name, suggestion)


def _positive(environment: Mapping[str, str], name: str, default: _T) -> float | _T:
    text = environment.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value > 0:
        raise InvalidUsageError(f"environment variable {name} must be a positive number, got {text!r}")
    return min(value, _LARGEST)


def _flag(environment: Mapping[str, str], name: str, default: bool) -> bool:
    return _FLAGS[_one_of(environment, name, _FLAGS, "1" if default else "0")]


def _one_of(environment: Mapping[str, str], name: str, values: Collection[str], default: str) -> str:
    """Return a variable that has one of some values, in any case; else the default."""
    text = environment.get(name, default)
    if text.lower() not in values:
        raise InvalidUsageError(
            f"environment variable {name} must be one of {', '.join(values)}, got {text!r}"
        )
    return text.lower()


def _signal(environment: Mapping[str, str], name: str) -> str | None:
    """Return which of the signals for users a variable names."""
    if name not in environment:
        return None
    return _one_of(environment, name, ("usr1", "usr2"), "usr2").upper()


def _control_plane(environment: Mapping[str, str]) -> str | None:
    """Return the address or folder of a control plane that starts by itself; None for none."""
    text = environment.get("DIST2_CONTROL_PLANE", "0")
    if text.lower() in _FLAGS:
        return LOOPBACK if _FLAGS[text.lower()] else None
    return _absolute(text.removeprefix("unix://")) if "/" in text else text  # the scheme of its URLs


def _absolute(text: str | None) -> str | None:
    """Return a path that stays the same where the program changes its directory; None for none."""
    return None if text is None else str(started_in / text)


def _incidents(environment: Mapping[str, str]) -> str | None:
    text = environment.get("DIST2_INCIDENTS", "1")
    if text.lower() in _FLAGS:
        return None if _FLAGS[text.lower()] else "0"
    return _absolute(text)


def temporary_folder() -> str:
    """Return the folder for temporary files; where none can be written to, that in memory."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return MEMORY


def _secret(environment: Mapping[str, str]) -> Secret | None:
    value, path = environment.get("DIST2_SECRET"), environment.get("DIST2_SECRET_FILE")
    if value and path:
        raise InvalidUsageError(
            "environment variables DIST2_SECRET and DIST2_SECRET_FILE are both set: unset one"
        )
    if path:
        return read_secret(path, "DIST2_SECRET_FILE")
    return Secret(value.encode(errors="surrogateescape"), "DIST2_SECRET") if value else None


def _tls_files(environment: Mapping[str, str]) -> dict[str, str | None]:
    names = ("DIST2_TLS_CERT", "DIST2_TLS_KEY", "DIST2_TLS_CA")
    found = {name: environment.get(name) for name in names}
    missing = [name for name, path in found.items() if path is None]
    if missing and len(missing) < len(names):
        raise InvalidUsageError(f"TLS needs {', '.join(names)}; not set: {', '.join(missing)}")
    return {name.removeprefix("DIST2_").lower(): path for name, path in found.items()}
