"""The documents of the project, and the blocks of code in them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from support.programs import ROOT

FOLDERS = (ROOT, ROOT / "docs", ROOT / "docs" / "reference", ROOT / "benchmarks" / "notes")
DOCUMENTS = sorted(path for folder in FOLDERS for path in folder.glob("*.md"))
READ = sorted({*DOCUMENTS, *(ROOT / "examples").rglob("*.md")})
"""All documents, those beside examples too."""

_BLOCK = re.compile(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", re.MULTILINE)


def blocks_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of each block of code."""
    for _, language, block in _BLOCK.findall(text):
        yield language, textwrap.dedent(block)


def python_blocks(text: str, language: str = "python") -> list[str]:
    """Return the programs of a document (``python``), or its fragments (``py``)."""
    return [block for each, block in blocks_of(text) if each == language]


def output_of(document: str, command: str) -> str:
    """Return the output that a document shows below a command."""
    blocks = "".join(f"{block}\n" for _, block in blocks_of((ROOT / document).read_text()))
    (shown,) = re.findall(rf"^\$ {re.escape(command)}\b.*\n((?:[^$\n].*\n|\n)+)", blocks, re.MULTILINE)
    return str(shown).rstrip()
