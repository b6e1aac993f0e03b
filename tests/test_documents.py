"""Checks of the documents: links, tables of errors and settings, and programs that must run."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from support.documents import DOCUMENTS, READ, python_blocks
from support.programs import ROOT, torchrun

from dist2.runtime.config import Config

LINK = re.compile(r"\]\(([^)]+)\)")
MENTION = re.compile(r"\bdocs/[a-z_]+\.md\b")
FILE = re.compile(r"(?<![\w/])(?:dist2|observability)/[\w/]+\.(?:py|c|h)\b")
EVIDENCE = re.compile(r"`(?:tests/\w+/)?(test_\w+\.py)(::(\w+))?`")
NAMED = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)(?:\([^`]*\))?`(?!`)")
PLACED = re.compile(r"`(\w+)` in (compiled/[\w/]+\.[ch])")
C_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
WORD = re.compile(r"\w+")
OF_OTHERS = {"AsyncCollectiveTensor", "DeviceMesh", "SSLSocket", "histogram_quantile", "vectorcall"}
"""Names in the source that belong to other projects, and that it does not call."""
RECIPE = re.compile(r"From `(examples/\w+\.py)`:\n\n```py\n(.*?)```", re.DOTALL)
PROGRAMS = [path for path in READ if python_blocks(path.read_text())]


def headings(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    lines = [line.lstrip("# ") for line in document.read_text().splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", line).lower().replace(" ", "-") for line in lines}


def dead_links(document: Path) -> list[str]:
    """Return the links of a document that lead to no file or heading of the tree."""
    dead = []
    for link in LINK.findall(document.read_text()):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in headings(target)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("document", READ, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    assert not dead_links(document)


def test_a_dead_link_is_seen(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("# Title\n[here](#title) [file](b.md) [heading](#no-title)")
    assert dead_links(document) == ["b.md", "#no-title"]


def test_documents_that_the_source_names_exist() -> None:
    sources = [path for name in ("dist2", "observability") for path in (ROOT / name).rglob("*.py")]
    named = {(path.name, each) for path in sources for each in MENTION.findall(path.read_text())}
    assert not [pair for pair in sorted(named) if not (ROOT / pair[1]).exists()]


def absent_files(texts: dict[Path, str]) -> list[tuple[str, str]]:
    """Return the files of the library that texts name and that are not there."""
    named = {(path.name, each) for path, text in texts.items() for each in FILE.findall(text)}
    return [pair for pair in sorted(named) if not (ROOT / pair[1]).exists()]


def test_files_that_documents_and_docstrings_name_exist() -> None:
    texts = {path: path.read_text() for path in DOCUMENTS if path.name != "CHANGELOG.md"}
    texts |= {path: text for path, text in sources_of_the_library().items() if path.suffix == ".py"}
    assert not absent_files({path: text for path, text in texts.items() if "notes" not in path.parts})


def test_an_absent_file_is_seen() -> None:
    text = "`dist2/run.py`, dist2/core/ring.c and dist2/queue.py"
    assert absent_files({Path("a.md"): text}) == [("a.md", "dist2/queue.py")]


def code_and_prose(path: Path, text: str) -> tuple[set[str], str]:
    """Return the words of a source's code, and its comments and docstrings."""
    if path.suffix in (".c", ".h"):
        return set(WORD.findall(C_COMMENT.sub("", text))), "\n".join(C_COMMENT.findall(text))
    words, prose = set(), []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            words.add(token.string)
        elif token.type == tokenize.STRING and token.string.startswith('"""'):
            prose.append(token.string)
        elif token.type == tokenize.STRING:
            words |= set(WORD.findall(token.string))
        elif token.type == tokenize.COMMENT:
            prose.append(token.string)
    return words, "\n".join(prose)


def unknown_names(sources: dict[Path, str]) -> Iterator[tuple[str, str]]:
    """Yield names in backticks, in comments and docstrings, that the code does not contain, by file."""
    read = {path: code_and_prose(path, text) for path, text in sources.items()}
    known = OF_OTHERS.union(*(words for words, _ in read.values()))
    known |= {part for path in read for part in (*path.parts, path.stem)}
    for path, (_, prose) in read.items():
        for name in NAMED.findall(prose):
            if name not in known and not known.issuperset(name.split(".")):
                yield path.name, name


def sources_of_the_library() -> dict[Path, str]:
    """Return the text of the Python and C sources, by path."""
    paths = [path for name in ("dist2", "observability") for path in (ROOT / name).rglob("*.*")]
    return {path: path.read_text() for path in paths if path.suffix in (".py", ".pyi", ".c", ".h")}


def test_what_the_source_names_exists() -> None:
    assert not list(unknown_names(sources_of_the_library()))


def test_an_unknown_name_is_seen() -> None:
    python = 'def known() -> None:\n    """`known`, `gone`, `a.known` and `b.h`."""  # `lost()`\n'
    sources = {Path("a.py"): python, Path("b.h"): "int here; /* `here`, `there` */"}
    assert list(unknown_names(sources)) == [("a.py", "gone"), ("a.py", "lost"), ("b.h", "there")]


def test_what_the_source_says_is_in_a_file_is_there() -> None:
    for path, text in sources_of_the_library().items():
        for name, place in PLACED.findall(text):
            assert name in WORD.findall((ROOT / "dist2" / place).read_text()), (path.name, name, place)


def words_without_a_source(rows: str) -> list[str]:
    """Return the words of a glossary that are not in the files that are said to define them."""
    files = {path.name: text.lower() for path, text in sources_of_the_library().items()}
    files |= {path.name: path.read_text().lower() for path in (ROOT / "dist2").rglob("*.pyx")}
    unknown = []
    for words, where in re.findall(r"^\| (\*\*.+?) \|.*\| (.+) \|$", rows, re.MULTILINE):
        named = re.findall(r"`([\w.]+)`", where)
        texts = " ".join(f"{name} {files.get(name, '')}" for name in named).replace("_", " ")
        found = re.findall(r"\*\*(.+?)\*\*", words)
        unknown += [word for word in found if word.replace("-", " ") not in texts]
        unknown += [name for name in named if name not in files]
    return unknown


def test_the_words_of_the_glossary_are_used_where_it_says() -> None:
    text = (ROOT / "docs" / "socket-backend.md").read_text()
    glossary = text[text.index("## Words of the data plane") :]
    assert "**fence**" in glossary
    assert not words_without_a_source(glossary)


def test_an_unused_word_is_seen() -> None:
    rows = "| **queue**, **mill** | order | `queue.py` |\n| **ring** | a pipe | `pipe.py` |\n"
    assert words_without_a_source(rows) == ["mill", "ring", "pipe.py"]


def test_what_is_said_to_show_a_promise_exists() -> None:
    text = (ROOT / "docs" / "failures.md").read_text()
    files = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    for name, _, test in EVIDENCE.findall(text):
        assert name in files, name
        assert not test or f"\ndef {test}(" in files[name].read_text(), (name, test)
    for path in re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py)`", text):
        assert (ROOT / path).exists(), path


def test_every_error_is_explained() -> None:
    trees = [ast.parse(path.read_text()) for path in (ROOT / "dist2" / "errors").glob("*.py")]
    defined = {node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
    names = defined - {"Dist2Error", "Where"}
    text = (ROOT / "docs" / "errors.md").read_text()
    explained = {name for name in names if f"\n### {name}\n" in text and f"\n| [{name}](" in text}
    assert explained == names


VARIABLE = re.compile(r'"(DIST2_[A-Z_]+[A-Z])"')
VARIABLE_ROW = re.compile(r"^\| `(DIST2_\w+)` \| ([^|]+) \| ([^|]+) \|", re.MULTILINE)
FIELD_OF_VARIABLE = re.compile(r"^ +(\w+): ``(DIST2_[A-Z_]+)", re.MULTILINE)


def default_as_text(value: object) -> str:
    """Return the default of a setting as docs/environment.md writes it."""
    if value is None or value == "":
        return "unset"
    return str(int(value)) if isinstance(value, (bool, float)) else str(value)


def test_the_document_lists_every_environment_variable_with_its_default() -> None:
    text = (ROOT / "docs" / "environment.md").read_text()
    rows = {name: default for name, _, default in VARIABLE_ROW.findall(text)}
    sources = [path.read_text() for path in (ROOT / "dist2").rglob("*.py")]
    assert set(rows) == {name for source in sources for name in VARIABLE.findall(source)}
    fields = {variable: field for field, variable in FIELD_OF_VARIABLE.findall(Config.__doc__ or "")}
    assert set(fields.values()) == {each.name for each in attrs.fields(Config)}
    expected = {name: default_as_text(getattr(Config(), field)) for name, field in fields.items()}
    assert {name: rows[name] for name in fields} == expected


@pytest.mark.torchrun
@pytest.mark.timeout(120)
@pytest.mark.parametrize("document", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_programs_in_a_document_run(document: Path, tmp_path: Path) -> None:
    blocks = python_blocks(document.read_text())
    calls = [f"exec({block!r}, {{}})\n" for block in blocks]
    script = tmp_path / "programs.py"
    script.write_text("".join([*calls, "print('all ran')"]))
    ended = torchrun(script, 2, folder=tmp_path)
    assert ended.code == 0, ended
    assert ended.output.count("all ran") == 2, ended
    assert all(count_of_prints(block) for block in blocks)


def test_there_are_programs() -> None:
    assert {"README.md", "quickstart.md", "migrating.md", "index.md"} <= {path.name for path in PROGRAMS}


def test_the_cookbook_is_cut_from_examples() -> None:
    text = (ROOT / "docs" / "cookbook.md").read_text()
    recipes = RECIPE.findall(text)
    assert len(recipes) == text.count("\n## ") == len(python_blocks(text, "py"))
    for example, block in recipes:
        lines = [line.strip() for line in (ROOT / example).read_text().splitlines()]
        wanted = [line.strip() for line in block.splitlines()]
        places = range(len(lines) - len(wanted) + 1)
        assert any(lines[at : at + len(wanted)] == wanted for at in places), block


def count_of_prints(block: str) -> int:
    """Return how many calls of `print` a program has."""
    calls = [node.func for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    return sum(isinstance(func, ast.Name) and func.id == "print" for func in calls)
