"""The wheel: its content, and that it works without the source tree."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from support.programs import ROOT, Ended, run

PROBE = """
import json, sys
from importlib.metadata import entry_points
from pathlib import Path
import torch
import dist2, dist2.legacy, observability

pg = dist2.new_group("socket", timeout=20, store=dist2.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
pg.all_reduce(tensor)
with observability.start(pg) as server:
    counted = observability.read_metrics(server.url, server.token).value("dist2_operations_total")
pg.shutdown()
print(json.dumps({
    "homes": [str(Path(module.__file__).parent.parent) for module in (dist2, observability)],
    "typed": [(Path(module.__file__).parent / "py.typed").exists() for module in (dist2, observability)],
    "backends": dist2.backend_names(),
    "counted": counted,
    "sum": tensor.tolist(),
}))
"""


BUILD_S = 200.0
"""Time for a build beside other tests. All of it takes 40 s of CPU."""
pytestmark = pytest.mark.timeout(BUILD_S + 60)
GENERATED, COMPILED = Path("build/cython"), Path("build/lib")


def build(folder: Path, what: str = "--wheel", done: tuple[Path, ...] = (GENERATED, COMPILED)) -> Ended:
    """Build from a copy of the source into ``folder / "dist"``, without a network.

    Args:
        folder: An empty one.
        what: The archive to build.
        done: Parts of the build in place there that this one starts with. It makes those anew that are older
            than their sources, without optimization. What is not compiled already cannot be compiled.
    """
    compiler = 'cc "$@" -O0' if COMPILED in done else "false"
    cc = folder / "cc"
    cc.write_text(f"#!/bin/sh\nexec {compiler}\n")
    cc.chmod(0o700)
    source = folder / "source"
    source.mkdir()
    unwanted = shutil.ignore_patterns("__pycache__", "*.so")
    for package in ("dist2", "observability", "tests", "examples", "benchmarks"):
        shutil.copytree(ROOT / package, source / package, ignore=unwanted)
    for file in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    (source / "setup.cfg").write_text(f"[build]\nbuild-lib = {COMPILED}\n")
    if GENERATED in done and (ROOT / GENERATED).exists():
        shutil.copytree(ROOT / GENERATED, source / GENERATED)
    if COMPILED in done:
        for module in (ROOT / "dist2").rglob("*.so"):
            copy = source / COMPILED / module.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(module, copy)
    return run(
        [sys.executable, "-m", "build", what, "--no-isolation", "--outdir", folder / "dist", source],
        timeout_s=BUILD_S,
        variables={"CC": str(cc), "LDSHARED": f"{cc} -shared"},
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the modules of the build in place, by which `make test` has installed dist2."""
    folder = tmp_path_factory.mktemp("wheel")
    made = build(folder)
    assert made.code == 0, made
    (archive,) = (folder / "dist").glob("*.whl")
    return archive


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel alone in a fresh environment, which borrows the dependencies of this one."""
    home = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    interpreter = home / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", interpreter, "install", "--quiet"]
    subprocess.run([*command, "--no-deps", "--no-index", wheel], check=True)
    # Path files inside a folder that a path file names are not read: the editable dist2 stays out.
    (site_packages,) = home.glob("lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return interpreter


def test_it_holds_what_it_must_and_no_more(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"dist2/py.typed", "observability/py.typed"} <= set(names)
    pages = ROOT / "observability" / "server" / "pages"
    shown = {str(path.relative_to(ROOT)) for path in pages.rglob("*") if path.is_file()}
    assert {
        f"{pages.relative_to(ROOT)}/{name}" for name in ("index.html", "vendor/uPlot-LICENSE.txt")
    } <= shown
    assert shown <= set(names)
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"dist2", "observability"}
    assert not [name for name in names if name.endswith((".c", ".h", ".pyx", ".pxd"))]
    (license_file,) = (name for name in names if name.endswith("/LICENSE"))
    assert b"Apache License" in zipfile.ZipFile(wheel).read(license_file)


def test_every_module_is_in_it(wheel: Path) -> None:
    here = {
        str(path.relative_to(ROOT))
        for name in ("dist2", "observability")
        for path in (ROOT / name).rglob("*.py")
    }
    assert here == {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}


def test_the_extensions_are_in_it(wheel: Path) -> None:
    names = [Path(name) for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    built = {str(name.parent / name.name.partition(".")[0]) for name in names}
    compiled = {path.with_suffix("") for kind in ("*.pyx", "*.pxd") for path in (ROOT / "dist2").rglob(kind)}
    modules = {path for path in compiled if any(map(Path.exists, map(path.with_suffix, (".pyx", ".py"))))}
    assert built == {str(path.relative_to(ROOT)) for path in modules}
    files = [zipfile.ZipFile(wheel).read(str(name)) for name in names]
    assert not any(b".debug_info" in file for file in files)


def test_the_sources_of_the_extensions_are_in_the_source_archive(tmp_path: Path) -> None:
    made = build(tmp_path, "--sdist", (GENERATED,))
    assert made.code == 0, made
    (archive,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()}
    kinds = {".c", ".h", ".pyx", ".pxd"}
    sources = {str(each.relative_to(ROOT)) for each in (ROOT / "dist2").rglob("*") if each.suffix in kinds}
    assert sources | {"setup.py"} <= packed
    folders = {name.partition("/")[0] for name in packed if "/" in name}
    assert folders == {"dist2", "observability", "dist2.egg-info"}


def test_the_release_builds_wheels_for_the_versions_that_it_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    built = re.findall(r"cp3(\d+)", project["tool"]["cibuildwheel"]["build"])
    named = re.findall(r"Python :: 3\.(\d+)", " ".join(project["project"]["classifiers"]))
    assert set(named) <= set(built)


def test_without_a_compiler_it_says_what_to_do(tmp_path: Path) -> None:
    made = build(tmp_path, done=(GENERATED,))
    assert made.code != 0
    for way_out in ("install a C compiler", "pip install ziglang", "pip wheel"):
        assert way_out in made.output + made.errors, made
    assert not list(tmp_path.glob("dist/*.whl"))


def test_it_works_where_only_it_is_installed(python: Path, tmp_path: Path) -> None:
    ended = subprocess.run(
        [python, "-I", "-W", "error", "-c", PROBE], cwd=tmp_path, capture_output=True, text=True, timeout=40
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert set(found["homes"]) == {str(next(python.parent.parent.glob("lib/python*/site-packages")))}
    assert found["typed"] == [True, True]
    assert {"socket", "gloo", "fake"} <= set(found["backends"])
    assert found["sum"] == [1, 1, 1]
    assert found["counted"] == 1


def test_it_brings_the_command(python: Path, tmp_path: Path) -> None:
    command = [python, "-I", python.parent / "dist2", "--version"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=40)
    assert (ended.returncode, ended.stdout.split()[0]) == (0, "dist2"), ended.stderr
