"""The fragments of the documents (blocks ``py``) run, each in the context that its text describes.

Whole programs (blocks ``python``) run in `test_documents.py`.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re
import signal
import sys
import types
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import torch
from support import processes
from support.documents import READ, blocks_of, python_blocks
from support.processes import DIED, Crew, run_processes
from support.programs import ROOT, run, torchrun
from support.stores import unused_port
from support.warm_interpreter import CHILDREN, warm_executable, warm_python

import dist2
import observability
from dist2 import ProcessGroup
from dist2.cli.bench.peers import MPICH, launcher
from observability.steps import StepCollector, steps

Names = dict[str, Any]

RUN: list[tuple[str, str]] = [("examples/kubernetes/README.md", "0.0.0.0")]
"""Each fragment that a test runs: its document, and words of it alone. The first: `test_kubernetes.py`."""
CUT_FROM_EXAMPLES = "docs/cookbook.md"
"""Its fragments are lines of examples, which `test_documents.py` compares."""


def text_of(document: str, words: str) -> str:
    """Return the one fragment of a document with some words, and note that a test runs it."""
    RUN.append((document, words))
    (block,) = [each for each in python_blocks((ROOT / document).read_text(), "py") if words in each]
    return block


def fragment(document: str, words: str) -> pytest.MarkDecorator:
    """Return the mark that gives a test a fragment as ``block``."""
    return pytest.mark.parametrize("block", [text_of(document, words)], ids=[document])


def fragments_that_no_test_runs(documents: dict[str, str], tested: list[tuple[str, str]]) -> list[str]:
    """Return the fragments that do not belong to exactly one test."""
    found = [(name, each) for name, text in documents.items() for each in python_blocks(text, "py")]
    counts = [sum(name == where and words in block for where, words in tested) for name, block in found]
    return [block for (_, block), count in zip(found, counts, strict=True) if count != 1]


def test_each_fragment_belongs_to_a_test() -> None:
    documents = {str(path.relative_to(ROOT)): path.read_text() for path in READ}
    del documents[CUT_FROM_EXAMPLES]
    assert not fragments_that_no_test_runs(documents, RUN)
    languages = {language for text in documents.values() for language, _ in blocks_of(text)}
    assert languages == {"python", "py", "console", "sh", "sql", "promql", "yaml", ""}


def test_a_fragment_without_a_test_is_seen() -> None:
    text = "1.\n   ```py\n   if new:\n       pass\n   ```\n\n```py\nold\n```\n"
    assert fragments_that_no_test_runs({"a.md": text}, [("a.md", "old")]) == ["if new:\n    pass\n"]
    assert len(fragments_that_no_test_runs({"a.md": text}, [("b.md", "old"), ("a.md", "n")])) == 1


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    crew = Crew(2, tmp_path_factory.mktemp("pair"))
    yield crew
    crew.close()


def execute(block: str, **names: Any) -> Names:
    """Run a fragment; return its names."""
    known: Names = {"torch": torch, "dist2": dist2, "observability": observability, **names}
    exec(compile(block, "<fragment>", "exec"), known)
    return known


def as_launched(pg: ProcessGroup) -> None:
    """Set the variables of a launcher in this process, so that ``new_group("socket")`` meets the others."""
    port, rank = pg.broadcast_object(unused_port(), root=0), str(pg.rank())
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(pg.size()))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# Failures and membership


def loses_a_rank(pg: ProcessGroup, block: str) -> Any:
    pg.barrier()
    if pg.rank() == 2:
        die()
    printed: list[tuple[Any, ...]] = []
    left = execute(block, pg=pg, gradients=torch.ones(4), print=lambda *told: printed.append(told))["pg"]
    left.all_reduce(total := torch.ones(1))
    return printed, total.item()


@fragment("README.md", 'print("lost", error.ranks)')
def test_the_others_go_on_without_a_lost_rank(block: str, tmp_path: Path) -> None:
    told = ([("lost", (2,))], 2.0)
    assert run_processes(3, loses_a_rank, tmp_path, block) == [told, told, DIED]


def verifies(pg: ProcessGroup, block: str) -> str | None:
    as_launched(pg)
    with execute(block)["pg"] as verified:
        x = torch.ones(1024)
        verified.all_reduce(x)
        verified.backend.plan = wrong_on_rank_1(verified)
        verified.backend.plan_plain = verified.backend.plan
        try:
            verified.all_reduce(torch.ones(2048))
        except dist2.CorruptionError as error:
            return error.op
    return "not found"


def wrong_on_rank_1(pg: ProcessGroup) -> Callable[[Any], Any]:
    """Return the backend's `plan`, of which a float32 result on rank 1 has a wrong bit."""
    prepare = pg.backend.plan

    def planned(signature: Any) -> Any:
        run_plan = prepare(signature)

        def broken(operation: Any, inputs: Any, outputs: Any) -> None:
            run_plan(operation, inputs, outputs)
            if pg.rank() == 1 and outputs and outputs[0].dtype == torch.float32:
                outputs[0].view(torch.uint8)[5] ^= 8

        return broken

    return planned


@fragment("docs/failures.md", "verify=True")
def test_a_group_that_verifies_finds_a_wrong_bit(block: str, pair: Crew) -> None:
    assert pair.run(verifies, block) == ["all_reduce"] * 2


def recovers(pg: ProcessGroup, block: str) -> Any:
    """Rank 2 dies; rank 1 has taken one step more than rank 0 then."""
    restored: list[str] = []

    def take_step(group: ProcessGroup) -> None:
        group.all_reduce(torch.ones(1))

    pg.barrier()
    if pg.rank() == 2:
        die()
    step = 5 + pg.rank()
    snapshots = {each: f"state {each}" for each in (step - 1, step)}
    ended = execute(
        block, pg=pg, step=step, snapshots=snapshots, take_step=take_step, restore=restored.append
    )
    return ended["step"], restored, ended["pg"].size()


@fragment("docs/failures.md", "take_step(pg)")
def test_survivors_go_back_to_the_last_step_that_all_have(block: str, tmp_path: Path) -> None:
    told = (5, ["state 5"], 2)
    assert run_processes(3, recovers, tmp_path, block) == [told, told, DIED]


@fragment("docs/membership.md", "ThreadPoolExecutor(4)")
def test_ranks_are_threads(block: str) -> None:
    results = execute(block, ThreadPoolExecutor=ThreadPoolExecutor)["results"]
    assert [each.tolist() for each in results] == [[4.0] * 4] * 4


def agrees(pg: ProcessGroup, block: str) -> list[bool]:
    good = [execute(block, pg=pg, loaded=loaded) for loaded in (True, pg.rank() == 0)]
    return [bool(each["answer"].flags & each["CHECKPOINT_IS_GOOD"]) for each in good]


@fragment("docs/membership.md", "CHECKPOINT_IS_GOOD")
def test_ranks_agree(block: str, pair: Crew) -> None:
    assert pair.run(agrees, block) == [[True, False]] * 2


def needs_a_majority(pg: ProcessGroup, block: str) -> str:
    pg.barrier()
    if pg.rank() == 2:
        die()
    left = execute(block, pg=pg)["left"]
    left.barrier()
    if left.rank() == 1:
        die()
    try:
        execute(block, pg=left)
    except SystemExit as end:
        return f"{left.size()} of 3 went on; 1 of 2: {end}"
    return "went on"


@fragment("docs/membership.md", "too few ranks")
def test_a_minority_ends(block: str, tmp_path: Path) -> None:
    told = "2 of 3 went on; 1 of 2: too few ranks are left"
    assert run_processes(3, needs_a_majority, tmp_path, block) == [told, DIED, DIED]


def trains_on(pg: ProcessGroup, block: str) -> Any:
    """Rank 1 dies in step 2, which rank 0 completes; the model adds up the step numbers."""
    taken: list[int] = []

    def train(step: int, group: ProcessGroup) -> None:
        if (step, group.size()) != (2, 3):
            group.all_reduce(torch.ones(1))
        elif group.rank() == 1:
            die()
        elif group.rank() == 2:
            group.recv(torch.ones(1), 1)
        model[0] += step
        taken.append(step)

    model = torch.zeros(1)
    ended = execute(
        block,
        pg=pg,
        model=model,
        train=train,
        step=0,
        last=5,
        copy_of=torch.Tensor.clone,
        restore=torch.Tensor.copy_,
    )
    return model.item(), ended["step"], ended["pg"].size(), sorted(set(taken))


@fragment("docs/membership.md", "while step < last")
def test_training_continues_after_a_death(block: str, tmp_path: Path) -> None:
    told = (10.0, 5, 2, [0, 1, 2, 3, 4])
    assert run_processes(3, trains_on, tmp_path, block) == [told, DIED, told]


NEWCOMER = text_of("docs/membership.md", "pg = alone.merge_remote_group")


def rejoins(pg: ProcessGroup, survivors: str, newcomer: str) -> list[float]:
    """Ranks 0 to 2 are what is left of the group; rank 3 stands for the restarted process."""
    left, store = pg.split([0, 1, 2]), pg.spec.store
    merged = execute(survivors if left else newcomer, pg=left, store=store, attempt=1)["pg"]
    merged.all_gather_single(ranks := torch.empty(4), torch.tensor([float(pg.rank())]))
    merged.shutdown()
    return ranks.tolist()


@fragment("docs/membership.md", "pg = pg.merge_remote_group")
def test_a_rank_rejoins(block: str, tmp_path: Path) -> None:
    assert run_processes(4, rejoins, tmp_path, block, NEWCOMER) == [[0.0, 1.0, 2.0, 3.0]] * 4


# Functional collectives, launchers, other APIs


class Scaled(torch.nn.Module):
    """A model whose output is the sum of all ranks' inputs, doubled."""

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__()
        self.pg = pg

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = 2 * dist2.functional.all_reduce(x, self.pg)
        return doubled


def computes(pg: ProcessGroup, block: str) -> Any:
    x = torch.full((2,), float(pg.rank() + 1), requires_grad=True)
    quick: Any = functools.partial(torch.compile, backend="aot_eager")  # Inductor takes a minute
    names = {"torch": types.SimpleNamespace(compile=quick, export=torch.export)}
    ended = execute(block, x=x, pg=pg, model=Scaled(pg), **names)
    assert x.grad is not None
    return [each.tolist() for each in (x, ended["y"], x.grad, ended["step"](x), ended["program"].module()(x))]


@fragment("docs/functional.md", "fullgraph=True")
def test_functional_collectives_have_gradients_and_are_traced(block: str, pair: Crew) -> None:
    told = [[3.0, 3.0], [12.0, 12.0], [6.0, 6.0], [6.0, 6.0]]
    assert pair.run(computes, block) == [[[1.0, 1.0], *told], [[2.0, 2.0], *told]]


def overlaps(pg: ProcessGroup, block: str) -> float:
    x, w1, w2 = torch.ones(1, 2), torch.ones(2, 2), torch.full((2, 2), 0.5)
    loss: float = execute(block, functional=dist2.functional, pg=pg, x=x, w1=w1, w2=w2)["loss"].item()
    return loss


@fragment("docs/functional.md", "async_op=True")
def test_functional_collectives_overlap(block: str, pair: Crew) -> None:
    assert pair.run(overlaps, block) == [50.0] * 2


@fragment("docs/launchers.md", "dist2.launch.local(total, 4, 10.0)")
def test_a_function_is_called_on_ranks(block: str) -> None:
    warm_executable()
    program = f"import torch, dist2\n{block}\nprint(results)"
    ended = run([*warm_python(), CHILDREN, "-c", program])
    assert ended.output == block.rpartition("# ")[2], ended


class Worker:
    """What ``@ray.remote`` makes of a class: `remote` starts a process with an object in it."""

    def __init__(self) -> None:
        self._process = ProcessPoolExecutor(1, processes.context, set_up_ray)
        self.__ray_call__ = types.SimpleNamespace(remote=self._call)
        self.train = types.SimpleNamespace(remote=self._train)

    @classmethod
    def remote(cls) -> Worker:
        return cls()

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._process.submit(function, None, *arguments)

    def _train(self) -> Any:
        self._trained = self._process.submit(train_in_actor)
        return self._trained

    def close(self) -> float:
        """End the process; return the result of `train`."""
        self._process.shutdown()
        return self._trained.result()


def set_up_ray() -> None:
    """Put a module in the place of Ray: actors are processes, on one node."""
    ray: Any = types.ModuleType("ray")
    ray.get = lambda futures: [each.result(30) for each in futures]
    ray.get_runtime_context = lambda: types.SimpleNamespace(get_node_id=lambda: "node")
    sys.modules["ray"] = ray


def train_in_actor() -> float:
    with dist2.new_group("socket", timeout=30) as pg:
        pg.all_reduce(total := torch.ones(1))
        return total.item()


@fragment("docs/launchers.md", "dist2.launch.ray.ranks(workers)")
def test_actors_are_ranks(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # and again as it was
    set_up_ray()
    workers = execute(block, Worker=Worker)["workers"]
    assert [worker.close() for worker in workers] == [4.0] * 4


def uses_the_global_api(pg: ProcessGroup, block: str) -> float:
    as_launched(pg)
    tensor = torch.ones(1)
    names = execute(
        block,
        model=torch.nn.Linear(1, 1),
        tensor=tensor,
        DistributedDataParallel=torch.nn.parallel.DistributedDataParallel,
    )
    assert not names["dist"].is_initialized()
    return tensor.item()


@fragment("docs/legacy.md", "import dist2.legacy as dist")
def test_the_global_api(block: str, pair: Crew) -> None:
    assert pair.run(uses_the_global_api, block) == [2.0] * 2


@fragment("docs/mpi.md", 'new_group("mpi"')
def test_a_group_over_mpi(block: str, tmp_path: Path) -> None:
    mpi = launcher(MPICH, os.environ.get("LD_LIBRARY_PATH"))
    if mpi is None:
        pytest.skip(f"{MPICH.title} is not installed: {MPICH.install}")
    script = tmp_path / "train.py"
    script.write_text(f"{block}\nprint(x.tolist())")
    command: list[str | Path] = [*mpi.command, "-n", "2", sys.executable, "-m", "mpi4py", script]
    ended = run(command, variables={**mpi.environment, "PYTHONPATH": str(ROOT)})
    assert ended.output.count("[2.0, 2.0, 2.0, 2.0]") == 2, ended


@pytest.mark.torchrun
@fragment("examples/custom_backend/README.md", "import store_backend")
def test_the_template_of_a_backend(block: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    path = ROOT / "examples" / "custom_backend"
    script.write_text(
        f"import sys, torch, dist2\nsys.path.insert(0, {str(path)!r})\n{block}\n"
        "torch.distributed.all_reduce(x := torch.ones(1))\npg.all_reduce(x)\nprint(x.item())\n"
        "pg.shutdown()\ntorch.distributed.destroy_process_group()\n"
    )
    ended = torchrun(script, 2, folder=tmp_path)
    assert ended.output == "4.0\n4.0\n", ended


# Observability


PAGE = r"http://127\.0\.0\.1:\d+/#token=\S+"


def is_observed(pg: ProcessGroup, block: str) -> list[str]:
    as_launched(pg)
    printed: list[str] = []

    def train(group: ProcessGroup) -> None:
        group.all_reduce(torch.ones(1))
        group.barrier()

    names = execute(block, train=train, print=printed.append)
    names["pg"].shutdown()
    return printed


@fragment("docs/metrics.md", "import dist2, observability")
def test_each_rank_has_a_page(block: str, pair: Crew) -> None:
    for printed in pair.run(is_observed, block):
        assert re.fullmatch(PAGE, "\n".join(printed))


@fragment("docs/observability.md", "if pg.rank() == 0")
def test_rank_0_names_its_page(block: str, pair: Crew) -> None:
    first, second = pair.run(is_observed, block)
    assert re.fullmatch(PAGE, "\n".join(first))
    assert not second


def exported(registry: prometheus_client.CollectorRegistry) -> observability.Scrape:
    """Return the metrics that a registry exports."""
    return observability.parse_metrics(prometheus_client.generate_latest(registry).decode())


def exports(pg: ProcessGroup, block: str) -> float:
    execute(block, prometheus_client=prometheus_client)
    pg.all_reduce(torch.ones(1))
    return exported(prometheus_client.REGISTRY).value("dist2_operations_total", group="test", op="all_reduce")


@fragment("docs/metrics.md", "REGISTRY.register")
def test_metrics_are_added_to_an_exporter(block: str, tmp_path: Path) -> None:
    assert run_processes(2, exports, tmp_path, block) == [1.0] * 2


def dumps(pg: ProcessGroup, block: str, folder: Path) -> list[bool]:
    os.chdir(folder)
    pg.barrier()
    execute(block, signal=signal)
    dump = Path("dumps", f"flight_{pg.rank()}")
    found = [dump.exists()]
    dump.unlink()
    os.kill(os.getpid(), signal.SIGUSR2)
    while not dump.exists():
        pass
    return [*found, True]


@fragment("docs/metrics.md", "dump_flight_recorder(")
def test_dumps(block: str, tmp_path: Path) -> None:
    assert run_processes(2, dumps, tmp_path, block, tmp_path) == [[True, True]] * 2


def takes_steps(pg: ProcessGroup, block: str) -> float:
    execute(block, batches=range(3))
    registry = prometheus_client.CollectorRegistry()
    registry.register(StepCollector(steps))
    return exported(registry).value("dist2_step_duration_seconds_count")


@fragment("docs/metrics.md", "observability.step()")
def test_steps_are_counted(block: str, pair: Crew) -> None:
    assert pair.run(takes_steps, block) == [3.0] * 2


@pytest.mark.filterwarnings("ignore:`LoggingHandler`:DeprecationWarning")  # it moves to another package
@fragment("docs/metrics.md", "LoggingHandler")
def test_logs_are_sent_by_opentelemetry(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.sdk import _logs
    from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor

    for name in ("instrumentation", "instrumentation.logging", "instrumentation.logging.handler"):
        try:
            importlib.import_module(f"opentelemetry.{name}")
        except ImportError:  # the package with the handler, which the SDK has as well, is not installed
            module = types.ModuleType(name)
            vars(module).update(LoggingHandler=_logs.LoggingHandler)
            monkeypatch.setitem(sys.modules, f"opentelemetry.{name}", module)
    exporter: Any = InMemoryLogRecordExporter()  # type: ignore[no-untyped-call]
    provider = _logs.LoggerProvider()
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    handler = execute(block, logging=logging, provider=provider)["handler"]
    try:
        logging.getLogger("dist2.test").warning("told")
    finally:
        logging.getLogger("dist2").removeHandler(handler)
    assert [each.log_record.body for each in exporter.get_finished_logs()] == ["told"]
