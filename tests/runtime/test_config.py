"""Environment variables: permitted values, and errors that name variable and value."""

from __future__ import annotations

import tempfile
from pathlib import Path

import attrs
import pytest
from support.captured_logs import logged

import dist2
from dist2.backends.socket.tuning import Tuning
from dist2.errors import InvalidUsageError
from dist2.runtime.config import MEMORY, VARIABLES, Config, temporary_folder

FLAGS = (
    "DIST2_INSTRUMENTS",
    "DIST2_ALLOW_PICKLE",
)
NUMBERS = ("DIST2_TIMEOUT", "DIST2_SPIN_US", "DIST2_HEARTBEAT", "DIST2_RECORDER_SIZE", "DIST2_WAITING")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, value) for name in NUMBERS for value in ("soon", "0", "-1", "nan")],
        *[(name, "maybe") for name in FLAGS],
        ("DIST2_TRANSPORT", "pigeon"),
        ("DIST2_DUMP_SIGNAL", "kill"),
    ],
)
def test_a_bad_value_is_named_with_its_variable(name: str, value: str) -> None:
    with pytest.raises(InvalidUsageError, match=f"{name} must be .*got {value!r}"):
        Config.from_environment({name: value})


@pytest.mark.parametrize("name", sorted(VARIABLES))
def test_an_empty_variable_is_unset(name: str) -> None:
    assert Config.from_environment({name: ""}) == Config()


def test_each_setting_has_a_variable() -> None:
    settings = {field.name.removesuffix("_s") for field in attrs.fields(Config)}
    named = {name.removeprefix("DIST2_").lower() for name in VARIABLES}
    assert named == {*settings, "secret_file"}
    assert all(f"``{name}" in str(Config.__doc__) for name in VARIABLES)


def test_an_unknown_variable_is_logged_once_with_the_closest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIST2_TIMOUT", "60")
    monkeypatch.setenv("DIST2_ZZZZZZZZZZ", "")
    monkeypatch.setenv("DIST2_TIMEOUT", "60")
    with logged() as logs:
        for _ in range(2):
            assert Config.from_environment().timeout_s == 60
    assert [each["event"] for each in logs] == [
        "unknown environment variable DIST2_TIMOUT has no effect; did you mean DIST2_TIMEOUT?",
        "unknown environment variable DIST2_ZZZZZZZZZZ has no effect",
    ]


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_on_or_off_in_any_case(name: str) -> None:
    field = name.removeprefix("DIST2_").lower()
    for value, means in (("1", True), ("Yes", True), ("TRUE", True), ("0", False), ("No", False)):
        assert getattr(Config.from_environment({name: value}), field) is means
    assert getattr(Config.from_environment({name: ""}), field) is getattr(Config(), field)


def test_a_transport_is_named_in_any_case() -> None:
    for value, means in (("TCP", "tcp"), ("shm", "shm"), ("", "auto")):
        assert Config.from_environment({"DIST2_TRANSPORT": value}).transport == means


@pytest.mark.parametrize("value", ["inf", "1e30"])
def test_limits_without_end_are_long_ones(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DIST2_TIMEOUT", "DIST2_HEARTBEAT", "DIST2_SPIN_US", "MASTER_ADDR"):
        monkeypatch.setenv(name, "127.0.0.1" if name == "MASTER_ADDR" else value)
    monkeypatch.setenv("DIST2_TRANSPORT", "tcp")
    store = dist2.TCPStore("127.0.0.1", 0, is_master=True)
    with dist2.new_group("socket", store=store, rank=0, world_size=1) as pg:
        assert pg.timeout_s == 1e9
        pg.barrier()


def test_an_unusable_tuning_file_is_named_with_its_variable(tmp_path: Path) -> None:
    (tmp_path / "tuning.json").write_text("whatever")
    for path in (tmp_path / "tuning.json", tmp_path / "missing.json", tmp_path):
        with pytest.raises(InvalidUsageError, match=f"{path}.*DIST2_TUNING"):
            Tuning.read(path)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["DIST2_TLS_CERT"], "DIST2_TLS_KEY"),
        (["DIST2_TLS_CERT", "DIST2_TLS_KEY"], "DIST2_TLS_CA"),
        (["DIST2_SECRET", "DIST2_SECRET_FILE"], "are both set"),
    ],
)
def test_variables_that_belong_together_or_exclude_each_other(
    names: list[str], said: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("content")
    file.chmod(0o600)
    with pytest.raises(InvalidUsageError, match=said):
        Config.from_environment(dict.fromkeys(names, str(file)))


def test_temporary_files_are_in_memory_where_no_disk_can_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert temporary_folder() == str(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list[str])
    assert temporary_folder() == MEMORY


def test_relative_folders_stay_where_the_program_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may change its directory, each rank to one of its own: the ranks would not meet."""
    began = Path.cwd()
    monkeypatch.chdir(tmp_path)
    told = {"DIST2_INCIDENTS": "inc", "DIST2_DUMP": "d/{rank}", "DIST2_OPERATION_LOG": "/ops"}
    config = Config.from_environment({**told, "DIST2_CONTROL_PLANE": "./sockets"})
    assert config.incidents == str(began / "inc")
    assert config.dump == str(began / "d/{rank}")
    assert config.operation_log == "/ops"
    assert config.control_plane is not None
    assert Path(config.control_plane) == began / "sockets"
    assert Config.from_environment({"DIST2_CONTROL_PLANE": "0.0.0.0"}).control_plane == "0.0.0.0"
