"""Rendezvous by URL: from a URL and the environment to a store that the ranks share.

``env://`` reads ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, or the variables that other
launchers set in their place (`launchers`);
``tcp://host:port?rank=0&world_size=2`` and ``file:///path?rank=0&world_size=2`` contain them; ``mpi://`` asks
MPI (`mpi`). Rank 0 hosts the store, except under torchrun, where the agent does. ``docs/store.md`` has the
lifetime of a store.

If ``torch.distributed`` is initialised with the same rank and size, ``env://`` uses the store of its default
group, which all ranks have already. If dist2 came first, torch joins its server, which is torch's own
(`dist2.store.torch_server`). With credentials it is not: then torch's ``env://`` and ``tcp://`` meet by this
module, in processes that have met by dist2 before (`_ForTorch`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

import attrs
from torch.distributed import Store as TorchStore
from torch.distributed import distributed_c10d

from dist2.errors import (
    ArgumentTypeError,
    InvalidUsageError,
    RendezvousError,
    RendezvousTimeoutError,
    StoreError,
    StoreTimeoutError,
)
from dist2.rendezvous import launchers, mpi
from dist2.rendezvous.liveness import LivenessMonitor
from dist2.rendezvous.session import Endpoint, met_at, session_of, tell_from_thread
from dist2.runtime.arguments import as_int, check_store
from dist2.runtime.config import DEFAULT_TIMEOUT_S, Config, environment_value
from dist2.runtime.deadline import checked_timeout
from dist2.runtime.signals import OnCtrlC, on_ctrl_c
from dist2.runtime.torch_versions import RENDEZVOUS_HANDLERS, STORES_CLONE, default_tables
from dist2.security.authenticator import Credentials
from dist2.store.base import Store
from dist2.store.file import FileStore
from dist2.store.prefix import PrefixStore
from dist2.store.tcp import TCPStore


@attrs.frozen(eq=False)
class Meeting:
    """The result of a rendezvous; unpacks to ``store, rank, world_size``.

    Attributes:
        store: Shared by the ranks of this rendezvous, and by no others if dist2 made it.
        rank: The caller's.
        world_size: Number of ranks.
        roll: The processes of the ranks, where dist2 ran the rendezvous.
    """

    store: TorchStore
    rank: int
    world_size: int
    roll: LivenessMonitor | None = None

    def __iter__(self) -> Iterator[TorchStore | int]:
        return iter((self.store, self.rank, self.world_size))


Handler = Callable[..., object]
"""Called with a URL that contains rank and world size, and ``timeout=`` (a `timedelta`); returns, or yields
first, ``(store, rank, world_size)``."""


@on_ctrl_c(OnCtrlC.RAISE)
def rendezvous(
    url: str = "env://",
    rank: int | None = None,
    world_size: int | None = None,
    timeout: timedelta | float = DEFAULT_TIMEOUT_S,
    *,
    store: TorchStore | None = None,
) -> Meeting:
    """Meet the other ranks; all of them call this, in the same order if they call it several times.

    Each rendezvous gets a separate part of the store. Those of a process at one endpoint share the server
    and the connection.

    Args:
        url: ``env://``, ``tcp://host:port``, ``file:///path`` or a registered scheme; ``rank`` and
            ``world_size`` may be in its query.
        rank: The caller's; takes precedence over the URL and the environment. -1 means not given.
        world_size: Number of ranks, with the same precedence.
        timeout: How long to wait for others, and the timeout of the store: a `timedelta` or seconds.
        store: Meet here instead of at a URL; then rank and world size must be given.

    Raises:
        RendezvousError: A variable or a part of the URL is missing or wrong, the port is in use, the store
            cannot be reached; the message names it and its value.
        RendezvousTimeoutError: Ranks are missing; `missing` has them.
        InvalidUsageError: An argument has the wrong type.
    """
    span = checked_timeout(timeout)
    if store is not None:
        return _explicit(store, _both(rank, world_size))
    handled = _with_handler(url, rank, world_size)
    if handled is not None:
        handler, url = handled
        return _handled(handler, url, span)
    return _at_torchs_store(url, _both(rank, world_size), span) or locate(url, rank, world_size).meet(span)


@attrs.frozen
class Located:
    """The endpoint of a URL, and the caller's rank: checked, but not used yet.

    Attributes:
        endpoint: The endpoint.
        rank: The caller's.
        world_size: Number of ranks.
    """

    endpoint: Endpoint
    rank: int
    world_size: int

    def meet(self, timeout: timedelta) -> Meeting:
        """Meet the other ranks there.

        Raises:
            RendezvousError: As `rendezvous`.
        """
        try:
            met, roll = session_of(self.endpoint, self.rank, self.world_size).come(timeout)
        except StoreError as error:
            words = f"{self.endpoint}: {error}"
            if not isinstance(error, StoreTimeoutError):
                raise RendezvousError(words) from error
            missing = (0,) if self.rank > 0 and self.endpoint.ends_with_rank_0 else ()
            raise RendezvousTimeoutError(words, missing=missing, timeout_s=timeout.total_seconds()) from error
        if isinstance(self.endpoint, ServerEndpoint) and not self.endpoint.hosted:
            _let_torch_in()
        return Meeting(met, self.rank, self.world_size, roll)


def locate(url: str, rank: int | None, world_size: int | None) -> Located:
    """Return the rendezvous that a URL of a built-in scheme asks for, without waiting for other ranks.

    If rank and world size do not fit, a thread tells the reason to the ranks that wait at the endpoint.

    Raises:
        RendezvousError: A variable or a part of the URL is missing or wrong.
        InvalidUsageError: An argument has the wrong type.
    """
    given, parts = _both(rank, world_size), _split(url)
    request = _Request(url, parts, _query(url, parts), given)
    finder = _ENDPOINTS.get(parts.scheme)
    if finder is None:
        known = ", ".join(f"{scheme}://" for scheme in sorted({*_ENDPOINTS, *_handlers}))
        raise RendezvousError(f"No rendezvous handler for {parts.scheme}:// in {url!r}; there are {known}")
    number, count = request.rank(), request.world_size()
    endpoint = finder(request)
    try:
        request.check(number, count)
    except RendezvousError as error:
        if count != 1:  # else there should be no others
            tell_from_thread(endpoint, str(error))
        raise
    return Located(endpoint, number, count)


def call_handler(url: str, rank: int | None, world_size: int | None, **options: object) -> object | None:
    """Return the result of the registered handler of a URL's scheme; None where there is no handler."""
    handled = _with_handler(url, rank, world_size)
    return None if handled is None else handled[0](handled[1], **options)


def register_rendezvous_handler(scheme: str, handler: Handler) -> None:
    """Let URLs of a scheme be handled by a function, as `torch.distributed` does.

    Args:
        scheme: The part before ``://``.
        handler: Gets the URL, with ``rank`` and ``world_size`` in its query where they were given, and
            ``timeout=`` as a `timedelta`. A generator function that yields ``(store, rank, world_size)``,
            or a function that returns them.

    Raises:
        InvalidUsageError: The scheme is taken ("already registered"), or ``handler`` cannot be called.
    """
    if not isinstance(scheme, str):
        raise ArgumentTypeError(f"scheme must be a str, got {scheme!r} ({type(scheme).__name__})")
    if not scheme:
        raise InvalidUsageError("scheme must be a non-empty str, got ''")
    with _lock:
        if scheme in _ENDPOINTS or scheme in _handlers:
            raise InvalidUsageError(f"Rendezvous handler for {scheme}:// already registered")
        if not callable(handler):
            raise ArgumentTypeError(f"handler must be callable, got {handler!r} ({type(handler).__name__})")
        _handlers[scheme] = handler


_lock = threading.Lock()
_handlers: dict[str, Handler] = {}


@attrs.frozen
class _Request:
    """A URL and the arguments given with it."""

    url: str
    parts: SplitResult
    query: Mapping[str, str]
    given: Mapping[str, int | None]

    @property
    def label(self) -> str:
        """First part of messages, with torch's text."""
        return f"{self.parts.scheme}:// rendezvous"

    def wrong(self, what: str) -> RendezvousError:
        return RendezvousError(f"Error initializing using {self.label}: {what} (url {self.url!r})")

    def rank(self) -> int:
        """Return the caller's rank."""
        return self._number("rank")[0]

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._number("world_size")[0]

    def check(self, rank: int, world_size: int) -> None:
        """Check that the two are compatible."""
        if world_size < 1:
            raise self.wrong(f"{self._number('world_size')[1]} must be at least 1, got {world_size}")
        if not 0 <= rank < world_size:
            raise self.wrong(f"{self._number('rank')[1]} must be from 0 to {world_size - 1}, got {rank}")

    def _number(self, name: str) -> tuple[int, str]:
        """Return a number and its source: the argument, the URL, or the environment."""
        given = self.given[name]
        if self.parts.scheme == "mpi":
            return self._number_in_mpi(name)
        if name in self.query:
            value = self.integer(self.query[name], f"{name} in the url")
            if given is not None and given != value:
                raise self.wrong(f"{name} is {value} in the url and {given} in the argument")
            return value, f"{name} in the url"
        if given is not None:
            return given, f"argument {name}"
        if self.parts.scheme == "env":
            return self.variable_integer(name.upper()), f"environment variable {name.upper()}"
        raise self.wrong(f"{name.replace('_', ' ')} parameter missing")

    def _number_in_mpi(self, name: str) -> tuple[int, str]:
        value = mpi.world()[name]
        told = (
            self.integer(self.query[name], f"{name} in the url") if name in self.query else self.given[name]
        )
        if told is not None and told != value:
            raise self.wrong(f"{name} is {value} in the MPI job and given as {told}")
        return value, f"{name} in the MPI job"

    def variable(self, name: str) -> str:
        """Return an environment variable that must be set."""
        value = launchers.variable(name)
        if not value:
            how = launchers.how_to_launch(sys.argv[0])
            raise self.wrong(f"environment variable {name} expected, but not set: {how}")
        return value

    def variable_integer(self, name: str) -> int:
        return self.integer(self.variable(name), f"environment variable {name}")

    def integer(self, text: str, what: str) -> int:
        try:
            return int(text)
        except ValueError:
            raise self.wrong(f"{what} must be an integer, got {text!r}") from None


# The endpoints of the built-in schemes


@attrs.frozen
class ServerEndpoint:
    """A store server's address; rank 0 hosts it, unless another process does.

    Attributes:
        host: Name or address.
        port: Its port.
        hosted: Whether another process hosts the server.
        label: The name used in messages.
    """

    host: str
    port: int
    hosted: bool
    label: str = attrs.field(eq=False)

    def __str__(self) -> str:
        return self.label

    @property
    def ends_with_rank_0(self) -> bool:
        """Whether rank 0 serves."""
        return not self.hosted

    def open(self, rank: int, world_size: int, timeout: timedelta) -> Store:
        """Join the server; as rank 0, host it if need be."""
        hosts = rank == 0 and not self.hosted
        return TCPStore(self.host, self.port, None, hosts, timeout, wait_for_workers=False, multi_tenant=True)


@attrs.frozen
class FileEndpoint:
    """A file that ranks share.

    Attributes:
        path: The file.
        label: The name used in messages.
    """

    path: str
    label: str = attrs.field(eq=False)

    def __str__(self) -> str:
        return self.label

    @property
    def ends_with_rank_0(self) -> bool:
        """No: a file stays."""
        return False

    def open(self, rank: int, world_size: int, timeout: timedelta) -> Store:
        """Open the file, or make it."""
        return FileStore(self.path, world_size, timeout)


def _env_endpoint(request: _Request) -> Endpoint:
    file = launchers.meeting_file()
    if file is not None:
        return FileEndpoint(file, f"{request.label} at {file}")
    host, port = request.variable("MASTER_ADDR"), request.variable_integer("MASTER_PORT")
    if host.split() != [host]:
        raise request.wrong(f"environment variable MASTER_ADDR must be a host, got {host!r}")
    if not 0 < port < 1 << 16:
        raise request.wrong(f"environment variable MASTER_PORT must be from 1 to 65535, got {port}")
    label = f"{request.label} at MASTER_ADDR={host}, MASTER_PORT={port}"
    return ServerEndpoint(host, port, _agent_serves(), label)


def _tcp_endpoint(request: _Request) -> Endpoint:
    try:
        host, port = request.parts.hostname, request.parts.port
    except ValueError as error:
        raise request.wrong(str(error)) from None
    if not host:
        raise request.wrong("host name missing")
    if not port:
        raise request.wrong(f"port number missing, must be from 1 to 65535, got {port}")
    return ServerEndpoint(host, port, _agent_serves(), f"{request.label} at {host}:{port}")


def _file_endpoint(request: _Request) -> Endpoint:
    if request.parts.netloc:
        raise request.wrong(f"path must be absolute (three slashes), got host {request.parts.netloc!r}")
    if not request.parts.path:
        raise request.wrong("path missing")
    return FileEndpoint(request.parts.path, f"{request.label} at {request.parts.path}")


_ENDPOINTS: dict[str, Callable[[_Request], Endpoint]] = {
    "env": _env_endpoint,
    "tcp": _tcp_endpoint,
    "file": _file_endpoint,
    "mpi": lambda request: mpi.MpiEndpoint(request.label),
}


def _agent_serves() -> bool:
    """Whether torchrun's agent hosts the store, so that no rank has to."""
    return environment_value("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _split(url: str) -> SplitResult:
    if not isinstance(url, str):
        raise ArgumentTypeError(f"url must be a str, got {url!r} ({type(url).__name__})")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise RendezvousError(f"url {url!r} cannot be read: {error}") from None
    if not parts.scheme:
        raise RendezvousError(f"url must begin with a scheme such as env:// or tcp://, got {url!r}")
    return parts


def _query(url: str, parts: SplitResult) -> dict[str, str]:
    try:
        return dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise RendezvousError(f"the query of url {url!r} cannot be read: {error}") from None


def _both(rank: int | None, world_size: int | None) -> Mapping[str, int | None]:
    return {"rank": _given(rank, "rank"), "world_size": _given(world_size, "world_size")}


def _given(value: int | None, name: str) -> int | None:
    if value is None:
        return None
    found = as_int(value)
    if found is None:
        raise ArgumentTypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__})")
    return None if found == -1 else found  # torch's value for "not given"


def _at_torchs_store(url: str, given: Mapping[str, int | None], timeout: timedelta) -> Meeting | None:
    """Return a rendezvous in the store of torch's default group; None where this is not the same job.

    A default group made by dist2 has met elsewhere, and the ranks of a "fake" one do not exist.
    """
    if _split(url).scheme != "env" or not distributed_c10d.is_initialized():
        return None
    default: Any = distributed_c10d.group.WORLD
    backend, store = default_tables().pg_map[default]
    if backend == "fake" or isinstance(store, Store) or store is None:
        return None
    query = _query(url, _split(url))
    for name, mine in (("rank", default.rank()), ("world_size", default.size())):
        told = (query.get(name), given[name], environment_value(name.upper()))
        if str(next((value for value in told if value is not None), mine)) != str(mine):
            return None
    own: Any = store.clone() if STORES_CLONE else store
    own.set_timeout(timeout)
    round_ = own.add(f"dist2/rank/{default.rank()}", 1)  # all ranks meet equally often
    return Meeting(PrefixStore(f"dist2/{round_}", own), default.rank(), default.size())


def _explicit(store: TorchStore, given: Mapping[str, int | None]) -> Meeting:
    check_store(store)
    rank, world_size = given["rank"], given["world_size"]
    if rank is None or world_size is None:
        raise RendezvousError(f"with store, give rank and world_size too, got {rank=} and {world_size=}")
    if world_size < 1 or not 0 <= rank < world_size:
        raise RendezvousError(f"rank must be from 0 to {world_size - 1} for {world_size=}, got {rank=}")
    return Meeting(store, rank, world_size)


def _with_handler(url: str, rank: int | None, world_size: int | None) -> tuple[Handler, str] | None:
    """Return the handler of a URL's scheme, and the URL with rank and world size in its query; or None."""
    given, parts = _both(rank, world_size), _split(url)
    with _lock:
        handler = _handlers.get(parts.scheme)
    if handler is None:
        return None
    numbers = {name: value for name, value in given.items() if value is not None}
    query = "&".join(filter(None, (parts.query, urlencode(numbers))))
    return handler, parts._replace(query=query).geturl()


def _handled(handler: Handler, url: str, timeout: timedelta) -> Meeting:
    met = handler(url, timeout=timeout)
    if isinstance(met, Iterator):
        met = next(met, None)
    triplet = tuple(met) if isinstance(met, Iterable) else ()
    if len(triplet) != 3:
        raise RendezvousError(
            f"the handler of {urlsplit(url).scheme}:// must give (store, rank, world_size), gave {met!r}"
        )
    return Meeting(*triplet)


@attrs.frozen
class _ForTorch:
    """torch's handler of a scheme, except at addresses where dist2 has met with credentials."""

    theirs: Handler

    def __call__(self, url: str, **options: Any) -> Iterator[Any]:
        located = _met_before(url)
        if located is None:
            yield from self.theirs(url, **options)  # type: ignore[misc]  # torch's are generator functions
        else:
            met = located.meet(options.get("timeout", distributed_c10d.default_pg_timeout))
            yield met.store, met.rank, met.world_size


def _let_torch_in() -> None:
    """Give torch a store with credentials: otherwise its rank 0 finds the address in use, and others wait."""
    if not Credentials.of(Config.from_environment()).required:
        return
    with _lock:
        for scheme in ("env", "tcp"):
            theirs = RENDEZVOUS_HANDLERS.get(scheme)
            if theirs is not None and not isinstance(theirs, _ForTorch):
                RENDEZVOUS_HANDLERS[scheme] = _ForTorch(theirs)


def _met_before(url: str) -> Located | None:
    """Return the rendezvous of a URL of torch's at which this process has met before.

    Raises:
        RendezvousError: As another rank, or in another number, whose server is there.
    """
    parts = _split(url)
    request = _Request(url, parts, _query(url, parts), _both(None, None))
    try:
        located = Located(_ENDPOINTS[parts.scheme](request), request.rank(), request.world_size())
    except RendezvousError:  # torch words it in its own way
        return None
    met = met_at(located.endpoint)
    if (located.rank, located.world_size) not in met and True in met.values():
        (rank, world_size), *_ = met
        raise request.wrong(
            f"dist2 has met there with credentials, as rank {rank} of {world_size}, so torch.distributed "
            f"cannot meet there as rank {located.rank} of {located.world_size}: use another port, or store="
        )
    return located if (located.rank, located.world_size) in met else None
