"""The commands in the documents: their parsers take the arguments, and the files that they name exist."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click
import pytest
from support.documents import READ, blocks_of
from support.programs import ROOT
from torch.distributed.run import get_args_parser

from dist2 import run
from dist2.cli.app import cli
from dist2.runtime.secret import Secret, read_secret

INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
BEFORE = re.compile(r"[A-Z_0-9]+=.*|sudo|export")
"""What may stand before a command."""
OF_READERS = {"train.py", "program.py", "hello.py", "face.py"}
ELSEWHERE = {
    "curl": "tests/observability/test_acts.py runs it",
    "openssl": "below, with umask",
    "umask": "below",
    "$DIST2_SECRET_FILE": "the file of these two",
    "kubectl": "needs a cluster; tests/integration/test_kubernetes.py reads what it would apply",
    "torchfrtrace": "tests/observability/test_incidents.py has it read an incident",
    "pytest": "tests/backends/test_plugin.py runs the suite of the template",
}
"""First words of commands in blocks that `checked` does not know, and who runs them or why none does."""
NO_COMMANDS = {
    "0 -> 1  HELLO": "a trace of frames",
    "FabricEndpoint": "a diagram",
    "Slow: step 812": "tests/observability/test_steps.py",
    "base.h": "a map of files",
    "dist2/": "a map of files",
    "legacy   functional": "a diagram",
    "python -m dist2.run [-n RANKS]": "below",
    "rank 2 arrives": "tests/observability/test_stragglers.py",
    "the group": "a map of files",
}
"""First words of blocks without a language that hold no commands, and what they are or who compares them."""
EXTRAS = {
    name
    for folder in (ROOT, ROOT / "examples" / "custom_backend")
    for name in tomllib.loads((folder / "pyproject.toml").read_text())["project"]["optional-dependencies"]
}


def commands_of(text: str) -> Iterator[list[str]]:
    """Yield the words of what may be commands: text in backticks, and lines of blocks without a language."""
    yield from commands_in(INLINE.findall(text))
    for language, block in blocks_of(text):
        if language in ("console", "sh", ""):
            yield from commands_in(lines_of(block))


def lines_of(block: str) -> list[str]:
    """Return the lines of a block that a reader types: those after a prompt, or all if there is none."""
    typed = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
    return typed or block.splitlines()


def commands_in(lines: list[str]) -> Iterator[list[str]]:
    """Yield the words of each command in some lines."""
    for line in lines:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a quotation mark without its other one
            continue
        command: list[str] = []
        for word in [*words, ";"]:
            if set(word) <= set("();<>|&"):
                yield command
                command = []
            elif command or not BEFORE.fullmatch(word):
                command.append(word)


def checked(words: list[str]) -> bool:
    """Whether this project or torch defines a command; checked where the words are more than its name.

    Raises:
        AssertionError: The command, or a file, target or extra that it names, does not exist.
        SystemExit, click.UsageError: Its parser refuses the arguments.
    """
    match words:
        case ["dist2", name, *arguments] if not name.startswith("-"):
            command = cli.get_command(click.Context(cli), name)
            assert command is not None, name
            if arguments:
                with suppress(click.MissingParameter):  # such as the URL: text names options alone too
                    command.make_context(name, ["." if each == "FOLDER" else each for each in arguments])
        case ["python", "-m", "dist2.run", first, *_] if not first.startswith("["):
            exists(run._parser().parse_args(with_program(words[3:])).program)
        case ["torchrun", _, *_] if words[-1].endswith(".py"):
            exists(get_args_parser().parse_args(words[1:]).training_script)
        case ["python", script, *arguments] if script.endswith(".py") or "/" in script:
            exists(script)
            if "/" in script:  # setup.py takes those of setuptools
                has_options(ROOT / script, arguments)
        case ["mpiexec", *_, "python", script]:
            exists(script)
        case ["make", _, *_]:
            has_targets(words[1:])
        case ["pip", "install", *arguments]:
            named = re.findall(r"(?:dist2|\.)\[([\w,-]+)\]", " ".join(arguments))
            assert {each for extras in named for each in extras.split(",")} <= EXTRAS
        case _:
            return False
    return True


def with_program(arguments: list[str]) -> list[str]:
    """Return arguments of a launcher, with a program if there are options only."""
    return arguments if arguments[-1].endswith(".py") else [*arguments, "train.py"]


def exists(script: str) -> None:
    assert script in OF_READERS or (ROOT / script).exists(), script


def has_options(script: Path, arguments: list[str]) -> None:
    """Check that a script names the options."""
    for option in re.findall(r"--[\w-]+", " ".join(arguments)):
        assert f'"{option}"' in script.read_text(), (script, option)


def has_targets(arguments: list[str]) -> None:
    text = (ROOT / "Makefile").read_text()
    for each in arguments:
        name, assigned, _ = each.partition("=")
        assert re.search(rf"^{name} *\?=" if assigned else rf"^{name}:", text, re.MULTILINE), each


@pytest.mark.parametrize("document", READ, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_in_a_document_are_taken(document: Path) -> None:
    for words in commands_of(document.read_text()):
        try:
            checked(words)
        except (SystemExit, click.UsageError) as error:
            raise AssertionError(" ".join(words)) from error


def unchecked(text: str) -> list[str]:
    """Return the commands and blocks of a document that nothing checks and that are in no list of reasons."""
    found = []
    for language, block in blocks_of(text):
        is_shell = language in ("console", "sh") or "$ " in block
        if not is_shell and (language or block.startswith(tuple(NO_COMMANDS))):
            continue
        commands = [words for words in commands_in(lines_of(block)) if words]
        found += [" ".join(words) for words in commands if not checked(words) and words[0] not in ELSEWHERE]
    return found


def test_each_command_in_a_block_is_checked_or_has_a_reason() -> None:
    assert not [each for path in READ for each in unchecked(path.read_text())]
    assert unchecked("```sh\nmpirun -n 2 x\n```\n") == ["mpirun -n 2 x"]
    assert unchecked("```\n$ cat x; dist2 ps  # why\noutput\n```\n") == ["cat x"]
    assert unchecked("```\nprinted by someone\n```\n") == ["printed by someone"]


def test_no_reason_is_left_over() -> None:
    blocks = [(language, block) for path in READ for language, block in blocks_of(path.read_text())]
    for begin in NO_COMMANDS:
        assert [block for language, block in blocks if not language and block.startswith(begin)], begin
    first = {words[0] for _, block in blocks for words in commands_in(lines_of(block)) if words}
    assert ELSEWHERE.keys() <= first


def test_the_documented_usage_of_the_launcher_has_its_options() -> None:
    (shown,) = re.findall(
        r"^python -m dist2\.run (\[.*)$", (ROOT / "docs" / "launchers.md").read_text(), re.MULTILINE
    )
    usage = run._parser().format_usage().partition("[-h] ")[2]

    def words(text: str) -> list[str]:
        return re.findall(r"--?[a-z-]+(?: [A-Z]+)?", text)

    assert words(shown) == words(usage)


def test_the_documented_commands_make_a_secret(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    (block,) = [
        each for _, each in blocks_of((ROOT / "docs" / "security.md").read_text()) if "openssl" in each
    ]
    script = "\n".join(["set -e", *lines_of(block)])
    subprocess.run(["sh", "-c", script], env={**os.environ, "HOME": str(tmp_path)}, timeout=20, check=True)
    file = tmp_path / ".dist2_secret"
    assert read_secret(str(file), "the file") == Secret(file.read_bytes().strip())
    assert file.stat().st_mode & 0o777 == 0o600


def test_commands_are_found() -> None:
    text = "".join(path.read_text() for path in READ)
    found = {" ".join(words[:2]) for words in commands_of(text) if checked(words)}
    assert {f"dist2 {each}" for each in cli.list_commands(click.Context(cli))} <= found
    assert {"python -m", "python benchmarks/tune.py", "make demo", "pip install"} <= found


@pytest.mark.parametrize(
    "command",
    [
        "dist2 wy URL",
        "dist2 top --twice URL",
        "dist2 bench --sizes 8,64KiBB",
        "python -m dist2.run --restarts 3 train.py",
        "torchrun --ranks=2 train.py",
        "python benchmarks/none.py",
        "python benchmarks/tune.py --rank 2",
        "make tests",
        "make demo RANK=2",
        "pip install 'dist2[controlplane]'",
    ],
)
def test_a_wrong_command_is_seen(command: str) -> None:
    for text in (f"`{command}`", f"```console\n$ X=1 {command}  # why\noutput\n```\n"):
        ((words),) = commands_of(text)
        with pytest.raises((AssertionError, SystemExit, click.UsageError)):
            checked(words)
