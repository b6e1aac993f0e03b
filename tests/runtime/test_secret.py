"""Secrets: where they come from, and that they do not show."""

from __future__ import annotations

import pickle
import traceback
from pathlib import Path

import attrs
import pytest

from dist2.errors import InvalidUsageError
from dist2.runtime.config import Config
from dist2.runtime.secret import Secret

VALUE = "0123456789abcdef-the-secret"


def of(**variables: str) -> Config:
    return Config.from_environment(variables)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(f"{VALUE}\n")
    path.chmod(0o600)
    return path


def test_a_value_and_a_file_are_the_same_secret(file: Path) -> None:
    assert of(DIST2_SECRET=VALUE).secret == of(DIST2_SECRET_FILE=str(file)).secret == Secret(VALUE.encode())
    assert of().secret is None
    assert of(DIST2_SECRET="").secret is None


def test_both_at_once_are_refused(file: Path) -> None:
    with pytest.raises(InvalidUsageError, match="DIST2_SECRET and DIST2_SECRET_FILE are both set"):
        of(DIST2_SECRET=VALUE, DIST2_SECRET_FILE=str(file))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666, 0o620])
def test_a_file_that_others_may_touch_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(InvalidUsageError, match=f"chmod 600 {file}"):
        of(DIST2_SECRET_FILE=str(file))


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidUsageError, match="No such file"):
        of(DIST2_SECRET_FILE=str(tmp_path / "missing"))
    with pytest.raises(InvalidUsageError, match="is not a file"):
        of(DIST2_SECRET_FILE=str(tmp_path))


@pytest.mark.parametrize("value", ["short", "x" * 5000])
def test_the_length_is_bounded_and_the_value_is_not_shown(value: str) -> None:
    with pytest.raises(InvalidUsageError, match="must have 16 to 4096 bytes") as caught:
        of(DIST2_SECRET=value)
    assert value not in "".join(traceback.format_exception(caught.value))


def test_a_secret_does_not_show_itself(file: Path) -> None:
    config = of(DIST2_SECRET=VALUE)
    texts = [repr(config), str(config.secret), repr(attrs.asdict(config)), f"{config.secret!r:>20}"]
    assert not any(VALUE in text for text in texts)
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(config)


def test_macs_depend_on_everything() -> None:
    secret = Secret(VALUE.encode())
    macs = {
        secret.mac("a", b"bc"),
        secret.mac("a", b"b", b"c"),
        secret.mac("ab", b"c"),
        secret.mac("a", b"bc", b""),
        Secret(VALUE.encode() + b"!").mac("a", b"bc"),
    }
    assert len(macs) == 5
    assert secret.vouches(secret.mac("a", b"b"), "a", b"b")
    assert not secret.vouches(secret.mac("a", b"b"), "a", b"c")
    assert not secret.vouches(b"", "a", b"b")


def test_tls_wants_all_its_files() -> None:
    files = {f"DIST2_TLS_{name}": f"/somewhere/{name}" for name in ("CERT", "KEY", "CA")}
    config = of(**files)
    assert (config.tls_cert, config.tls_key, config.tls_ca) == tuple(files.values())
    assert of().tls_cert is None
    for name in files:
        some = {other: path for other, path in files.items() if other != name}
        with pytest.raises(InvalidUsageError, match=f"not set: {name}"):
            of(**some)
