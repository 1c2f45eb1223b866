"""Rules for every test: one thread, no network, no user's files, a time limit, nothing left behind, no silent skips."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import threading
import uuid
import zlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

MARK = "CANOPY_TEST_RUN"
"""Environment variable that marks our processes, so that those whose parent was killed are found too."""

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
os.environ[MARK] = uuid.uuid4().hex
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the tests start some 200 programs: each would compile all modules
sys.dont_write_bytecode = False
HOME = tempfile.TemporaryDirectory(prefix="canopy-home-")
"""Where programs keep identities, swarms, histories, digests and what they give, in place of the user's folders."""
os.environ.update(
    XDG_CACHE_HOME=f"{HOME.name}/cache",
    XDG_CONFIG_HOME=f"{HOME.name}/config",
    XDG_DATA_HOME=f"{HOME.name}/data",
    XDG_STATE_HOME=f"{HOME.name}/state",
    CANOPY_SWARMS="none",
)
for _name in ("CANOPY_JOIN", "CANOPY_MODEL", "CANOPY_MQTT", "CANOPY_NETWORK_KEY"):
    os.environ.pop(_name, None)  # a user's own
if "CANOPY_TEST_DEVICE" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # programs that the tests start choose the CPU too
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU where a test calls them; programs do not choose them

import psutil  # noqa: E402  (after the environment: torch reads its thread count when it is first imported)
import pytest  # noqa: E402
from _pytest import runner  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import rsa  # noqa: E402
from hypothesis import settings  # noqa: E402

from swarm.directory.identity import Identity  # noqa: E402
from tests.kernels.interpreter import prepare_interpreter  # noqa: E402
from tests.leftovers import descendants, has_ended, is_lasting, started_meanwhile  # noqa: E402

CI = os.environ.get("CI", "false") not in {"", "0", "false"}
FOLDERS = {"unit": 60, "property": 120, "net": 60, "model": 120, "e2e": 240}
"""The folders in the order in which they run, with the timeout of one test in seconds."""
LONGEST = (
    *("e2e/test_faults.py", "e2e/test_health.py", "e2e/test_swarm.py", "e2e/test_guides.py", "e2e/test_wheel.py"),
    *("e2e/test_site.py", "e2e/test_misuse.py", "e2e/test_page.py"),
    "e2e/test_private_swarm.py",
)
"""Files of 20 s and more. Workers begin with them, or one of them would go on alone at the end."""
APART = "e2e/homes/"
"""Files that measure delays: workers begin them after the programs of the other end-to-end tests."""
PROCESS_FOLDERS = {"net", "model", "e2e"}
NODE_MODULES = Path(__file__).parent / "npm/node_modules"
LIBRARY_THREADS = ("_poll_wrapper", "channel_spin", "TMonitor", "pytest_timeout", "asyncio_")
"""Parts of the names of threads that grpc, tqdm, pytest and an event loop start once and keep for their whole life."""
LIBRARY_PROCESSES = ("multiprocessing.resource_tracker",)
NOT_OURS: set[int] = set()
"""Ids of processes that were looked at: to look at all of them twice per test took half a minute of the suite."""

settings.register_profile("canopy", derandomize=True, deadline=None, database=None)
settings.register_profile("explore", deadline=None, max_examples=2_000, print_blob=True)
settings.load_profile("canopy")


_primes: list[int] = []
_pairs: list[tuple[int, int]] = []
_pairing = threading.Lock()


def quick_identity(cls: type[Identity]) -> Identity:
    """One that nobody had before, of two primes of other ones: to find primes takes half of a node's start."""
    with _pairing:
        if not _pairs:
            found = rsa.generate_private_key(public_exponent=65_537, key_size=2_048).private_numbers()
            for prime in (found.p, found.q):
                _pairs.extend((max(prime, other), min(prime, other)) for other in _primes)
                _primes.append(prime)
        p, q = _pairs.pop()
    d = pow(65_537, -1, (p - 1) * (q - 1))
    public = rsa.RSAPublicNumbers(65_537, p * q)
    parts = rsa.RSAPrivateNumbers(p, q, d, d % (p - 1), d % (q - 1), pow(q, -1, p), public)
    return cls(parts.private_key(unsafe_skip_rsa_key_validation=True))


Identity.ephemeral = classmethod(quick_identity)  # type: ignore[method-assign, assignment]


def folder_of(path: Path) -> str:
    """The folder below tests/ that a test file lies in."""
    return path.relative_to(Path(__file__).parent).parts[0]


def place_of(path: Path, *, is_worker: bool) -> tuple[int, int]:
    """Where a file's tests run among the others: cheap ones first, or what takes longest where workers share them."""
    order = list(FOLDERS).index(folder_of(path))
    if not is_worker:
        return order, 0
    name = path.relative_to(Path(__file__).parent).as_posix()
    if name.startswith(APART):
        return -order, len(LONGEST) + 1
    return -order, LONGEST.index(name) if name in LONGEST else len(LONGEST)


def crossings(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """What `make test` leaves to `make test-all`: products of cases but for their diagonal (decision 0074).

    A case of several parameters is on the diagonal if it is the k-th of each, counted round where one has fewer values:
    so each value of each is there once at least. A marked test is left out whole, or keeps `part` of its cases.
    """
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    found: set[pytest.Item] = set()
    for cases in tests.values():
        marker = cases[0].get_closest_marker("crossing")
        if marker is None:
            found.update(_off_diagonal(cases))
        else:
            first, of = marker.kwargs.get("part", (len(cases), len(cases)))
            found.update(case for number, case in enumerate(cases) if number % of != first)
    return found


def _off_diagonal(cases: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    labels = [tuple(case.callspec._idlist) if hasattr(case, "callspec") else () for case in cases]
    axes = [list(dict.fromkeys(axis)) for axis in zip(*labels, strict=True)]
    longest = max(map(len, axes), default=0)
    diagonal = {tuple(axis[number % len(axis)] for axis in axes) for number in range(longest)}
    yield from (case for case, label in zip(cases, labels, strict=True) if label and label not in diagonal)


def tenth_of(item: pytest.Item) -> int:
    """The day, of ten, on which a crossing is run."""
    return zlib.crc32(item.nodeid.encode()) % 10


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the crossings that were not asked for."""
    core, tenth = config.getoption("core"), config.getoption("tenth")
    if not core and tenth is None:
        return
    left_out = {item for item in crossings(items) if tenth is None or tenth_of(item) != tenth}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("crossings", "products of cases (decision 0074)")
    group.addoption("--core", action="store_true", help="leave all crossings out")
    group.addoption("--tenth", type=int, choices=range(10), help="leave all crossings out but for this tenth")


def pytest_report_header(config: pytest.Config) -> str:
    tenth = config.getoption("tenth")
    if tenth is not None:
        return f"crossings: --tenth {tenth}"
    return "crossings: none" if config.getoption("core") else "crossings: all"


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("loadscopereorder", None):  # pytest-xdist would begin with the files that have most tests
        config.option.loadscopereorder = False
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job, which would pass that on
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_worker = hasattr(config, "workerinput")
    choose(config, items)
    items.sort(key=lambda item: place_of(item.path, is_worker=is_worker))
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(FOLDERS[folder_of(item.path)]))
        if item.get_closest_marker("asyncio") is not None and isinstance(item, pytest.Function):
            item.fixturenames.insert(item.fixturenames.index("nothing_left_behind") + 1, "no_task_left")


def in_one_chunk(call: Callable[..., Any], *given: object) -> Any:  # noqa: ANN401 - as what it calls
    return call(*given)


# CPython keeps frames in chunks of 16 KiB. A call at the end of one maps the next, and its return unmaps it: a loop
# there runs at a third of its speed, and whether a test has one is chance. Below a frame as large as this one, all
# frames lie in one chunk of 1 MiB.
in_one_chunk.__code__ = in_one_chunk.__code__.replace(co_stacksize=1 << 16)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    ran: bool = in_one_chunk(runner.pytest_runtest_protocol, item, nextitem)
    return ran


def pytest_runtest_setup(item: pytest.Item) -> None:
    prepare_interpreter()
    if item.get_closest_marker("needs_root") and os.geteuid() != 0:
        pytest.skip("needs root")
    if item.get_closest_marker("needs_npm") and not (NODE_MODULES.is_dir() and shutil.which("node")):
        pytest.skip("needs Node.js and its packages: apt-get install nodejs npm && npm ci --prefix tests/npm")
    for marker in item.iter_markers("needs_program"):
        name, package = marker.args
        if shutil.which(name) is None:
            pytest.skip(f"needs the program {name}: apt-get install {package}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if CI and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not accept: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if CI and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not accept: {report.longrepr}"
    return report


@pytest.fixture
async def no_task_left() -> AsyncIterator[None]:
    """Added to every async test: set up before its other fixtures, so it looks after they are gone."""
    yield
    if left := asyncio.all_tasks() - {asyncio.current_task()}:
        _, left = await asyncio.wait(left, timeout=1)
    assert not left, f"tasks left running: {left}"


def _threads() -> set[threading.Thread]:
    return {
        thread
        for thread in threading.enumerate()
        if not any(part in f"{thread.name} {type(thread).__name__}" for part in LIBRARY_THREADS)
    }


def _everywhere() -> Iterator[psutil.Process]:
    """All processes with our mark but this one."""
    running = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    NOT_OURS.intersection_update(running)  # an id that ended is another process's next time
    for pid in running - NOT_OURS - {os.getpid()}:
        try:
            process = psutil.Process(pid)
            if process.environ().get(MARK) == os.environ[MARK] and process.status() != psutil.STATUS_ZOMBIE:
                yield process
                continue
        except psutil.Error:
            pass  # the kernel's, somebody else's, or gone meanwhile
        NOT_OURS.add(pid)


def _processes(everywhere: bool) -> set[psutil.Process]:
    """Our descendants; `everywhere` adds those who lost their parent on the way."""
    found = descendants()
    if everywhere:
        found |= set(_everywhere())
    return {process for process in found if not _is_library(process)}


def _is_library(process: psutil.Process) -> bool:
    if is_lasting(process):
        return True  # workers end with what they work for, which files share: their own tests look after that
    try:
        return any(part in " ".join(process.cmdline()) for part in LIBRARY_PROCESSES)
    except psutil.Error:
        return True  # gone meanwhile


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Threads and processes that a test started end with it."""
    everywhere = folder_of(request.path) in PROCESS_FOLDERS
    threads, processes = _threads(), _processes(everywhere)
    yield
    left_threads = _threads() - threads
    left_threads = {thread for thread in left_threads if not has_ended(thread, 1.0)}
    _, left_processes = psutil.wait_procs(started_meanwhile(_processes(everywhere), processes), timeout=3)
    names = [str(process) for process in left_processes]
    for process in left_processes:
        process.kill()
    assert not left_threads, f"threads left running: {left_threads}"
    assert not names, f"processes left running: {names}"
