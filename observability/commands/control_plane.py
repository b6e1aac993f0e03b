"""`ControlPlane`: the one that a command's arguments name, and its errors in one line.

All ranks of a job have the same token, so a command that knows the URL of one can ask each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from ssl import SSLCertVerificationError
from typing import Any, NoReturn, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import parse_qs, quote, urlsplit

import attrs
import click

from dist2.errors import Dist2Error
from dist2.runtime.config import Config
from observability.client import Asker, require_http
from observability.token_files import token_at

NO_ANSWER = 2
"""Exit status of a command that no control plane answers."""

ANSWER_S = 30.0

_ELSEWHERE = (
    "all users of this host can see in ps. The user of the job needs none on its host; elsewhere, use "
    "--token-file or DIST2_CONTROL_TOKEN"
)
_QUERY_TOKEN = f"the query of the URL has a token, which no control plane reads and {_ELSEWHERE}"
_TRUST = (
    "set DIST2_TLS_CERT, DIST2_TLS_KEY and DIST2_TLS_CA as in the job, "
    "or SSL_CERT_FILE to the certificate of its CA"
)

_Command = TypeVar("_Command", bound=Callable[..., Any])


class NoAnswerError(Exception):
    """A control plane did not answer, or refused; the message is one line."""


@attrs.frozen
class ControlPlane:
    """A control plane and its token.

    Attributes:
        base: Its address, without a path.
        token: The token; None stands for the one that is derived from ``DIST2_SECRET``.
        asker: Sends the requests.
    """

    base: str
    token: str | None
    asker: Asker

    @classmethod
    def of(cls, url: str, token: str | None, token_file: Path | None) -> ControlPlane:
        """Return the control plane that arguments name, with the first token of several sources.

        These are the options, ``DIST2_CONTROL_TOKEN``, the fragment of the URL, and the file that a control
        plane of this user and host has written.

        Raises:
            NoAnswerError: The URL is not one of a control plane, or has a token in its query, or the file or
                the secret is unusable.
        """
        if "://" not in url and Path(url).is_socket():
            url = f"unix://{quote(str(Path(url).absolute()), safe='')}"
        elif "://" not in url and Path(url).exists():
            raise NoAnswerError(
                f"{url} is no URL of a control plane; an incident is read with: dist2 why {url}"
            )
        try:
            require_http(url)
            parts = urlsplit(url)
            if "token" in parse_qs(parts.query, keep_blank_values=True):
                raise NoAnswerError(_QUERY_TOKEN)
            base = f"{parts.scheme}://{parts.netloc}"
            if token_file is not None:
                token = token_file.read_text().strip()
            elif token is None:
                token = _token_of(base, parts.fragment)
            else:
                _warn_of_argument()
            return cls(base, token, Asker())
        except (OSError, Dist2Error, ValueError) as error:
            raise NoAnswerError(_one_line(error)) from error

    def at(self, base: str) -> ControlPlane:
        """Return the control plane of another rank of the job."""
        return attrs.evolve(self, base=base)

    def get(self, path: str, timeout_s: float = ANSWER_S, body: object = None) -> bytes:
        """Return the answer at a path; with a body, to a POST of it.

        Raises:
            NoAnswerError: It did not answer, or refused.
        """
        try:
            return self.asker.ask(f"{self.base}{path}", self.token, body=body, timeout_s=timeout_s)
        except HTTPError as error:
            error.close()
            raise NoAnswerError(f"{self.base} {_refusal(error)}") from error
        except (OSError, Dist2Error, ValueError) as error:
            if isinstance(getattr(error, "reason", None), SSLCertVerificationError):
                untrusted = f"{self.base} has a certificate that is not trusted here: {_one_line(error)}"
                raise NoAnswerError(f"{untrusted}; {_TRUST}") from None
            raise NoAnswerError(f"{self.base} does not answer: {_one_line(error)}") from error

    def get_json(self, path: str, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Return the JSON object at a path.

        Raises:
            NoAnswerError: It did not answer, or the answer is not a JSON object.
        """
        try:
            document = json.loads(self.get(path, timeout_s))
        except ValueError as error:
            raise NoAnswerError(f"{self.base} is not a control plane of dist2: {error}") from error
        if not isinstance(document, dict):
            raise NoAnswerError(f"{self.base} is not a control plane of dist2")
        return document


def _token_of(base: str, fragment: str) -> str | None:
    """Return a token that no option gives; None stands for the one that is derived from the secret."""
    linked = next(iter(parse_qs(fragment).get("token", [])), None)
    if linked is not None:
        _warn_of_argument()
    return Config.from_environment().control_token or linked or token_at(base)


def _warn_of_argument() -> None:
    click.echo(f"dist2: the token is an argument, which {_ELSEWHERE}.", err=True)


def _refusal(error: HTTPError) -> str:
    if error.code == HTTPStatus.UNAUTHORIZED:
        return (
            "refuses the token: give --token-file, or set DIST2_CONTROL_TOKEN, or DIST2_SECRET as in the job"
        )
    if error.code == HTTPStatus.NOT_FOUND:
        return "is not a control plane of dist2, or of an older version: it has no such path"
    try:
        reason = json.loads(error.reason)["reason"]
    except (ValueError, KeyError, TypeError):  # of another server
        reason = error.reason
    return f"refuses: {error.code} {_one_line(reason)}"


def _one_line(error: object) -> str:
    reason = error.reason if isinstance(error, URLError) else error
    text = " ".join(str(reason).split())
    return text if len(text) <= 200 else f"{text[:199]}…"


def end_without_answer(error: Exception, advice: str = "") -> NoReturn:
    """End the command with one line on standard error and the exit status `NO_ANSWER`."""
    click.echo(f"{error}{advice}", err=True)
    sys.exit(NO_ANSWER)


def write_output(path: Path, content: bytes) -> None:
    """Write the file that a command makes, or end the command."""
    try:
        path.write_bytes(content)
    except OSError as error:
        end_without_answer(NoAnswerError(f"{path}: {error.strerror or error}"))


def address(command: _Command) -> _Command:
    """Give a command the argument URL, and the options ``--token`` and ``--token-file``."""
    command = click.option(
        "--token-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="File that contains the token.",
    )(command)
    command = click.option(
        "--token",
        help="Server.token, visible in ps; by default that of DIST2_CONTROL_TOKEN, in URL, of a job of this "
        "user and host, or the one derived from DIST2_SECRET.",
    )(command)
    return click.argument("url")(command)
