"""Compiles traced graphs in worker processes, so that no thread of this process waits for a compiler or its GIL.

    future = submit(graph_module, threads=1, name="mlp")
    lowered = future.result()      # a library for AOTInductor's runner, and what must hold of its inputs

A worker is this package's _worker.py under the same interpreter. Each worker has one thread here that gives it jobs,
waits for answers and kills it when it must be; the thread starts with the first job and ends some minutes after the
last one, and its worker with it. A job fails alone: whatever becomes of its worker, the next job gets a fresh one.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import fcntl
import glob
import importlib.util
import itertools
import json
import logging
import os
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrograd import _worker
from retrograd._load import C as _C

__all__ = [
    "Lowered",
    "LoweringError",
    "NoCompiler",
    "check_compiler",
    "close",
    "compile_timeout",
    "shutdown",
    "submit",
    "wait",
    "warm_up",
]

logger = logging.getLogger("retrograd")

# Seconds after its last job at which a worker ends; it holds about half a gigabyte.
_IDLE = 300.0

# Below normal, so that the program that waits for the plan keeps its cores.
_NICE = 10

# Seconds of compiling after which a terminal gets to know.
_QUIET = 2.0

# How often a waiting thread looks whether there is something to show, in seconds.
_TICK = 0.5

# How much of a worker's output an error quotes, in characters.
_TAIL = 2000

# Operators that every torch has, so that the worker knows them too.
_OPERATORS = ("torch.ops.aten.", "torch.ops.prims.", "torch.ops.prim.", "torch.ops.fbgemm.", "torch.ops.mkldnn.")


class LoweringError(RuntimeError):
    """A graph was not compiled. The first line says why; the compiler's last output follows where there is any."""

    def __init__(self, why: str, output: str = "") -> None:
        super().__init__(f"{why}\n{output}" if output else why)
        self.why = why
        self.output = output


class NoCompiler(LoweringError):  # noqa: N818
    """There is no C++ compiler here that AOTInductor would use."""


@dataclass(frozen=True)
class Lowered:
    """A compiled graph.

    Attributes:
        library: path of the shared library. The file belongs to the receiver, who moves or deletes it.
        seconds: how long the worker took.
        guards: what must hold of the inputs, as JSON (see _worker.export_guards): "symbols", "inputs", "conditions".
    """

    library: str
    seconds: float
    guards: dict[str, Any]


def submit(graph_module: Any, *, threads: int, name: str, out_dir: str | None = None) -> Future[Lowered]:
    """Compiles a graph in a worker process. Never raises: what goes wrong is in the future, as LoweringError.

    Only pickling happens in the calling thread, and the graph is not needed after that. Callbacks of the future run in
    a thread of this module, and not at all in a process that was forked meanwhile.

    Args:
        graph_module: ATen operators only, traced on fake tensors. Its placeholders carry them in meta["val"]; sizes may
            be symbols of one ShapeEnv. Its output is a flat tuple of tensors.
        threads: intra-op threads the plan will run with.
        name: for messages; need not be unique.
        out_dir: an existing folder for the library, best on the file system where it is to stay; else the temporary
            folder.
    """
    future: Future[Lowered] = Future()
    try:
        compiler = check_compiler()
        blob = _pickled(graph_module)
    except LoweringError as error:
        future.set_exception(error)
        return future
    request = {"task": "lower", "name": name, "threads": int(threads)}
    _pool.add(_Job(future, request, blob, name, out_dir, compiler))
    return future


def warm_up() -> None:
    """Starts a worker now, in the background, and has it prepare what the first compile on a machine prepares."""
    with contextlib.suppress(LoweringError):
        compiler = check_compiler()
        _pool.add(_Job(Future(), {"task": "prime", "name": "warm-up"}, b"", "warm-up", None, compiler), only_first=True)


def wait(timeout: float | None = None) -> bool:
    """Waits until no submitted graph is being compiled or about to be.

    Returns whether that came true within `timeout` seconds. Callbacks of the futures have run by then.
    """
    return _pool.wait(timeout)


def shutdown() -> None:
    """Ends the workers at once. What they had not finished fails; the next submit() starts anew."""
    _pool.shutdown("retrograd's compile workers were shut down")


def close() -> None:
    """As shutdown(), for good: what is submitted from now on fails."""
    _pool.shutdown("the program ended before the plan was compiled", final=True)


def check_compiler() -> str:
    """The C++ compiler that AOTInductor will use. Costs microseconds once it has been found.

    Raises:
        NoCompiler: there is none.
    """
    # AOTInductor's own rule: CXX, or else g++.
    wanted = os.environ.get("CXX") or "g++"
    key = (wanted, os.environ.get("PATH"))
    found = _compilers_found.get(key)
    if found is None:
        found = shutil.which(wanted)
        if found is None:
            asked = f"CXX names {wanted!r}, which is no program here" if os.environ.get("CXX") else "there is no g++"
            raise NoCompiler(
                f"retrograd cannot compile plans: {asked}. Install a C++ compiler (`apt install g++`, or your "
                "system's package), or set CXX to the path of one."
            )
        found = _compilers_found[key] = os.path.abspath(found)
    return found


_compilers_found: dict[tuple[str, str | None], str] = {}


def _pickled(graph_module: Any) -> bytes:
    # Lowering traces the graph once more, and makes what it wants to know of all nodes but the inputs by itself.
    # Without that, pickling takes a third of the time.
    stripped: list[tuple[Any, Any]] = []
    try:
        from torch.fx._graph_pickler import GraphPickler, Options

        for node in graph_module.graph.nodes:
            if node.op != "placeholder":
                stripped.append((node, node.meta))
                node.meta = {}
        options = Options(
            ops_filter=lambda operator: operator.startswith(_OPERATORS),
            node_metadata_key_filter=lambda key: key == "val",
        )
        return GraphPickler.dumps(graph_module, options)
    except Exception as error:
        raise LoweringError(f"the graph cannot be sent to the compiler ({_worker._first_line(error)})") from error
    finally:
        for node, meta in stripped:
            node.meta = meta


def compile_timeout() -> float:
    """Seconds that one compile may take: RETROGRAD_COMPILE_TIMEOUT, or 600."""
    return _number("RETROGRAD_COMPILE_TIMEOUT", 600.0)


def _number(variable: str, default: float) -> float:
    text = os.environ.get(variable)
    if text:
        try:
            if (value := float(text)) > 0:
                return value
        except ValueError:
            pass
        logger.warning("%s=%r is no positive number: %g is used", variable, text, default)
    return default


# Jobs and the threads that see to them ------------------------------------------------------------------------------


@dataclass(eq=False)
class _Job:
    future: Future[Lowered]
    request: dict[str, Any]
    blob: bytes
    name: str
    out_dir: str | None
    compiler: str

    @property
    def shown(self) -> bool:
        return self.request["task"] == "lower"


class _Pool:
    """The queue of jobs and the threads that take from it. All state is behind `_changed`'s lock."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: collections.deque[_Job] = collections.deque()
        self._pending: set[_Job] = set()  # queued or running
        self._threads: set[threading.Thread] = set()
        self._waiting = 0  # threads that wait for a job
        self._workers: set[_Worker] = set()
        self._generation = 0  # counts shutdowns
        self._closed: str | None = None  # why nothing can be added any more
        self._progress = _Progress()

    def add(self, job: _Job, only_first: bool = False) -> None:
        with self._changed:
            if only_first and self._threads:
                return
            closed = self._closed
            if closed is None:
                self._pending.add(job)
                self._queue.append(job)
                self._progress.added(job)
                limit = max(1, int(_number("RETROGRAD_WORKERS", 1)))
                if self._waiting < len(self._queue) and len(self._threads) < limit:
                    thread = threading.Thread(
                        target=self._serve, args=(self._generation,), name="retrograd-lowering", daemon=True
                    )
                    try:
                        thread.start()  # it waits for the lock
                        self._threads.add(thread)
                    except RuntimeError as error:  # no threads left, or the interpreter is going
                        closed = f"no thread can be started ({error})"
                        self._queue.remove(job)
                        self._pending.discard(job)
                        self._progress.removed(job)
                self._changed.notify_all()
        if closed is not None:
            job.future.set_exception(LoweringError(closed))

    def wait(self, timeout: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not any(job.shown for job in self._pending), timeout)

    def shutdown(self, why: str, final: bool = False) -> None:
        with self._changed:
            if final:
                self._closed = why
            self._generation += 1
            dropped = list(self._queue)
            self._queue.clear()
            for worker in self._workers:
                worker.kill(why)
            threads = list(self._threads)
            self._changed.notify_all()
        for job in dropped:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(LoweringError(why))
            self._finished(job)
        end = time.monotonic() + 5
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))

    def abandon(self) -> None:
        """In a forked child: the threads and workers are the parent's; only this process's ends of them are closed."""
        for worker in self._workers:
            worker.abandon()
        self._progress.abandon()
        for job in self._pending:
            # The future's lock may be held by a thread that does not exist here. Its callbacks are not for this place.
            job.future._condition = threading.Condition()
            job.future._done_callbacks = []
            if not job.future.done():
                job.future._state = "RUNNING"
                job.future.set_exception(
                    LoweringError(f"the process was forked while {job.name} was compiled, which goes on in the parent")
                )

    def _serve(self, generation: int) -> None:
        """A thread's work: one worker, started when there is a job and kept for the next ones."""
        _C.this_thread_makes_plans()  # code of the user's that gets in here, a finalizer, say, must not wait for one
        worker: _Worker | None = None
        try:
            while (found := self._next(generation)) is not None:
                job, generation = found
                try:
                    worker = self._run(job, worker, generation)
                finally:
                    if not job.future.done():  # an error that nobody foresaw, but somebody waits
                        job.future.set_exception(LoweringError(f"{job.name} was not compiled"))
                    self._finished(job)
        finally:
            if worker is not None:
                self._drop(worker)
            with self._changed:
                self._threads.discard(threading.current_thread())

    def _next(self, generation: int) -> tuple[_Job, int] | None:
        """The next job and the generation it belongs to, or None when it is time to go."""
        end = time.monotonic() + _IDLE
        with self._changed:
            self._waiting += 1
            try:
                while not self._queue:
                    left = end - time.monotonic()
                    if left <= 0 or generation != self._generation:
                        # Gone before the lock is released, so that a job that comes now starts a thread of its own.
                        self._threads.discard(threading.current_thread())
                        return None
                    self._changed.wait(left)
                return self._queue.popleft(), self._generation
            finally:
                self._waiting -= 1

    def _run(self, job: _Job, worker: _Worker | None, generation: int) -> _Worker | None:
        """Runs a job to its end and returns the worker if it is still good."""
        if not job.future.set_running_or_notify_cancel():
            return worker
        if worker is not None and worker.killed:  # by a shutdown that this job came after
            self._drop(worker)
            worker = None
        logger.debug("compiling %s", job.name)
        self._progress.started(job)
        lowered: Lowered | None = None
        error: LoweringError
        for attempt in (1, 2):
            try:
                if worker is None:
                    worker = self._start(job, generation)
                answer = worker.do(job, self._progress.tick)
                if answer["ok"]:
                    if job.shown:
                        library = _hand_over(answer["library"], job)
                        lowered = Lowered(library, answer["seconds"], answer["guards"])
                        logger.info("compiled %s in %.1f s", job.name, answer["seconds"])
                else:
                    error = _explained(answer, worker.tail())
                worker.clear()
                break
            except _WorkerGone as gone:
                output = worker.tail() if worker is not None else ""
                if worker is not None:
                    self._drop(worker)
                    worker = None
                logger.debug("the worker for %s is gone: %s", job.name, gone)
                error = LoweringError(str(gone), output)
                if gone.before_job and attempt == 1:
                    continue
                break
            except LoweringError as failed:
                error = failed
                break
            except Exception as unforeseen:
                logger.debug("unforeseen, while compiling %s", job.name, exc_info=True)
                error = LoweringError(f"{job.name} was not compiled: {_worker._first_line(unforeseen)}")
                if worker is not None:
                    self._drop(worker)
                    worker = None
                break
        self._progress.ended(job)
        if lowered is not None or not job.shown:
            job.future.set_result(lowered)  # type: ignore[arg-type]
        else:
            logger.info("not compiled: %s: %s", job.name, error.why)
            job.future.set_exception(error)
        return worker

    def _start(self, job: _Job, generation: int) -> _Worker:
        worker = _Worker(job.compiler)
        with self._changed:
            self._workers.add(worker)
            if generation != self._generation:
                worker.kill("retrograd's compile workers were shut down")
        return worker

    def _drop(self, worker: _Worker) -> None:
        worker.end()
        with self._changed:
            self._workers.discard(worker)

    def _finished(self, job: _Job) -> None:
        with self._changed:
            self._pending.discard(job)
            self._changed.notify_all()
            self._progress.removed(job)


def _explained(answer: dict[str, Any], output: str) -> LoweringError:
    why = answer["why"]
    match answer["kind"]:
        case "refused":
            return LoweringError(f"the graph cannot become a compiled plan: {why}")
        case "disk":
            return LoweringError(
                f"the disk is full: the compiler needs some megabytes in {tempfile.gettempdir()}", output
            )
        case "memory":
            return LoweringError("the compiler ran out of memory", output)
    return LoweringError(f"the compiler failed ({why})", output)


def _move(source: str, target: str) -> None:
    try:
        os.replace(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


def _hand_over(library: str, job: _Job) -> str:
    """Moves the library to where its receiver wants it; it is there whole or not at all.

    So does the file next to it that lists the operators for which Inductor has no code of its own. libtorch looks for
    it under the library's name when it loads that.
    """
    folder = job.out_dir or tempfile.gettempdir()
    stem = re.sub(r"[^\w.-]+", "_", job.name)[:60]
    made: list[str] = []
    try:
        fd, target = tempfile.mkstemp(dir=folder, prefix=f"retrograd-{stem}-", suffix=".so")
        made.append(target)
        os.close(fd)
        operators, its_target = (f"{os.path.splitext(path)[0]}.json" for path in (library, target))
        if os.path.exists(operators):
            made.append(its_target)
            _move(operators, its_target)
        _move(library, target)
        os.chmod(target, 0o700)
        return target
    except OSError as error:
        for path in made:
            with contextlib.suppress(OSError):
                os.unlink(path)
        raise LoweringError(f"the compiled library cannot be put into {folder} ({error.strerror})") from error


# One worker ---------------------------------------------------------------------------------------------------------


class _WorkerGone(Exception):  # noqa: N818
    """The worker is of no use any more. Before a job began, that is no fault of the job."""

    def __init__(self, why: str, before_job: bool = False) -> None:
        super().__init__(why)
        self.before_job = before_job


class _Worker:
    """A worker process and its pipes. One thread uses it; any thread may kill it.

    That thread must outlive it: where the kernel ends a worker with its parent, "parent" means the thread.
    """

    _numbers = itertools.count(1)

    def __init__(self, compiler: str) -> None:
        self._killed: str | None = None
        self._ready = False
        self._reaped = False
        self._lock = threading.Lock()  # guards _killed and _reaped
        self._buffer = b""
        self._folder, self._folder_lock = _make_folder()
        self._log = os.path.join(self._folder, "log")
        fds: list[int] = []
        try:
            requests, self._requests = os.pipe()
            fds += [requests, self._requests]
            self._answers, answers = os.pipe()
            fds += [self._answers, answers]
            os.set_blocking(self._requests, False)
            os.set_blocking(self._answers, False)
            setup = {
                "requests": requests,
                "answers": answers,
                "parent": os.getpid(),
                "scratch": self._folder,
                "nice": _NICE,
                "path": _import_path(),
            }
            with open(self._log, "ab") as log:
                self._process = subprocess.Popen(
                    [_python(), "-P", *(["-s"] if sys.flags.no_user_site else []), _worker_file(), json.dumps(setup)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self._folder,
                    env=_environment(compiler, self._folder),
                    pass_fds=(requests, answers),
                    start_new_session=True,  # Ctrl-C is for the parent only, and its compilers can be killed with it
                )
        except OSError as error:
            for fd in fds:
                os.close(fd)
            _remove_folder(self._folder, self._folder_lock)
            raise LoweringError(f"a compile worker cannot be started ({error})") from error
        except BaseException:
            for fd in fds:
                os.close(fd)
            _remove_folder(self._folder, self._folder_lock)
            raise
        os.close(requests)
        os.close(answers)
        logger.debug("compile worker %d started", self._process.pid)

    def do(self, job: _Job, tick: Any) -> dict[str, Any]:
        """Has a job done and returns the answer.

        Raises:
            _WorkerGone: it died, did not answer in time, or answered nonsense; it must be ended.
        """
        limit = compile_timeout()
        deadline = time.monotonic() + limit
        taken = False
        try:
            if not self._ready:
                hello = self._receive(deadline, tick)
                if not hello["ok"]:
                    raise _WorkerGone(f"the compile worker cannot load torch ({hello['why']})")
                torch_here = sys.modules["torch"].__version__
                if hello["torch"] != torch_here:
                    raise _WorkerGone(f"the compile worker found torch {hello['torch']}, not {torch_here}")
                self._ready = True
            number = next(self._numbers)
            folder = os.path.join(self._folder, f"job-{number}")
            os.mkdir(folder)
            request = {**job.request, "id": number, "folder": folder, "timeout": limit}
            self._transmit(_worker.frame(json.dumps(request).encode()) + _worker.frame(job.blob), deadline, tick)
            if self._receive(deadline, tick)["taken"] != number:
                raise _worker.GarbledError("the answer is to another job")
            taken = True
            answer = self._receive(deadline, tick)
            if answer["id"] != number:
                raise _worker.GarbledError("the answer is to another job")
            return answer
        except TimeoutError:
            raise _WorkerGone(
                self._killed
                or f"compiling {job.name} took more than {limit:g} s (RETROGRAD_COMPILE_TIMEOUT) and was stopped"
            ) from None
        except (EOFError, BrokenPipeError, ConnectionResetError):
            why = self._killed or f"the compile worker died while it compiled {job.name} ({self._death()})"
            raise _WorkerGone(why, before_job=not taken and self._killed is None) from None
        except (_worker.GarbledError, ValueError, TypeError, KeyError) as error:
            raise _WorkerGone(
                f"the compile worker for {job.name} sent nonsense over its pipe ({error}) and was stopped"
            ) from None
        except OSError as error:
            raise _WorkerGone(f"{job.name} could not be given to the compile worker ({error})") from error

    @property
    def killed(self) -> bool:
        """Whether kill() was called."""
        return self._killed is not None

    def tail(self) -> str:
        """The last lines of what the worker and its compilers printed."""
        with contextlib.suppress(OSError), open(self._log, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 4 * _TAIL))
            text = log.read().decode(errors="replace").strip()
            if len(text) > _TAIL:
                text = "..." + text[-_TAIL:]
            return text
        return ""

    def clear(self) -> None:
        """Removes what the last job left behind."""
        for entry in os.scandir(self._folder):
            if entry.name.startswith("job-"):
                shutil.rmtree(entry.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.truncate(self._log, 0)

    def kill(self, why: str) -> None:
        """Kills it with all it has started; whoever waits for it gets `why`. From any thread."""
        with self._lock:
            self._killed = self._killed or why
            self._signal()

    def end(self) -> None:
        """Kills it and lets go of everything. Only by the thread that uses it."""
        with self._lock:
            if self._reaped:
                return
            self._signal()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            self._reaped = True
        os.close(self._requests)
        os.close(self._answers)
        _remove_folder(self._folder, self._folder_lock)
        logger.debug("compile worker %d ended", self._process.pid)

    def abandon(self) -> None:
        """In a forked child: leaves the worker to the parent."""
        if self._reaped:
            return
        self._reaped = True
        self._process.returncode = 0  # it is no child of this process, which must not wait for it
        for fd in (self._requests, self._answers, self._folder_lock):
            with contextlib.suppress(OSError):
                os.close(fd)

    def _signal(self) -> None:
        # The group's number stays taken as long as the worker, dead or not, has not been waited for.
        if self._process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _death(self) -> str:
        with self._lock:
            self._signal()  # the compilers it started, which may still be writing
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(10)
                if code == -signal.SIGKILL:
                    return "killed, perhaps for want of memory"
                if code < 0:
                    with contextlib.suppress(ValueError):
                        return f"signal {signal.Signals(-code).name}"
                return f"exit status {code}"
        return "no exit status"

    def _transmit(self, data: bytes, deadline: float, tick: Any) -> None:
        view = memoryview(data)
        while view:
            _wait_for(self._requests, select.POLLOUT, deadline, tick)
            with contextlib.suppress(BlockingIOError):
                view = view[os.write(self._requests, view) :]

    def _receive(self, deadline: float, tick: Any) -> dict[str, Any]:
        length = _worker.frame_length(self._read(_worker.HEADER_SIZE, deadline, tick))
        if length > _worker.MAX_ANSWER:
            raise _worker.GarbledError(f"a message of {length} bytes")
        answer = json.loads(self._read(length, deadline, tick))
        if not isinstance(answer, dict):
            raise _worker.GarbledError("no answer but other JSON")
        return answer

    def _read(self, size: int, deadline: float, tick: Any) -> bytes:
        while len(self._buffer) < size:
            _wait_for(self._answers, select.POLLIN, deadline, tick)
            with contextlib.suppress(BlockingIOError):
                part = os.read(self._answers, 1 << 16)
                if not part:
                    raise EOFError
                self._buffer += part
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data


def _wait_for(fd: int, event: int, deadline: float, tick: Any) -> None:
    poll = select.poll()
    poll.register(fd, event)
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if poll.poll(min(left, _TICK) * 1000):
            return
        tick()


def _python() -> str:
    """An interpreter like this one, but not a program that embeds Python: that one must not run again."""
    candidates = [sys.executable, getattr(sys, "_base_executable", None)]
    if not getattr(sys, "frozen", False):
        for path in candidates:
            if path and re.match(r"(python|pypy)", os.path.basename(path)):
                return path
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for name in (os.path.join(sys.base_prefix, "bin", version), os.path.join(sys.base_prefix, "bin", "python3")):
        if os.access(name, os.X_OK):
            return name
    raise LoweringError("no Python interpreter was found that could run a compile worker beside this program")


def _worker_file() -> str:
    return os.path.abspath(_worker.__file__)


def _import_path() -> list[str]:
    """Folders that the worker adds at the end of its path: where torch and what torch needs were found here.

    Not this process's whole path: the script's folder and the current one may hold a `queue.py` of the user's.
    """
    folders = []
    for name in ("torch", "sympy", "mpmath", "typing_extensions", "numpy", "filelock", "networkx", "jinja2", "dill"):
        module = sys.modules.get(name)
        spec = getattr(module, "__spec__", None)
        if module is None:
            with contextlib.suppress(ImportError, ValueError):
                spec = importlib.util.find_spec(name)
        origin = getattr(spec, "origin", None)
        if origin and os.path.isabs(origin):
            path = Path(origin)
            folders.append(str(path.parent.parent if path.name == "__init__.py" else path.parent))
    return list(dict.fromkeys(folders))


def _environment(compiler: str, folder: str) -> dict[str, str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        # What changes how an interpreter starts is for the user's program; the worker is told its path.
        if name not in ("PYTHONPATH", "PYTHONINSPECT", "PYTHONSTARTUP", "PYTHONBREAKPOINT", "PYTHONWARNINGS")
    }
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of further processes, in sessions of their own
    if environment.pop("CXX", None):
        environment["CXX"] = compiler
    # Inductor keeps compiled headers, which save ten seconds, in a folder under TMPDIR with a name that anybody can
    # guess. (It takes no notice of TORCHINDUCTOR_CACHE_DIR there.) What others may have put there is not for us.
    temporary = tempfile.gettempdir()
    environment["TMPDIR"] = temporary if _is_safe(os.path.join(temporary, _inductor_folder())) else folder
    return environment


def _inductor_folder() -> str:
    import getpass

    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    return "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user)


def _is_safe(folder: str) -> bool:
    try:
        status = os.lstat(folder)
    except OSError:
        return True  # not there yet
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


# Temporary folders --------------------------------------------------------------------------------------------------

_PREFIX = "retrograd-worker-"


def _make_folder() -> tuple[str, int]:
    """A worker's folder, and a lock on it that this process holds: without one it is anybody's to remove."""
    try:
        _sweep_folders()
        folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getuid()}-")
        made = os.path.join(folder, "new-lock")
        lock = os.open(made, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(made, os.path.join(folder, "lock"))
    except OSError as error:
        raise LoweringError(
            f"no folder can be made in {tempfile.gettempdir()} ({error.strerror}): set TMPDIR to another place"
        ) from error
    return folder, lock


def _remove_folder(folder: str, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.close(lock)


def _sweep_folders() -> None:
    """Removes the folders of processes that were killed together with their workers."""
    for folder in glob.glob(os.path.join(tempfile.gettempdir(), f"{_PREFIX}{os.getuid()}-*")):
        with contextlib.suppress(OSError):
            if os.lstat(folder).st_uid != os.getuid():
                continue
            lock = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


# Progress -----------------------------------------------------------------------------------------------------------


class _Progress:
    """One line on a terminal's stderr while a compile takes long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = 0  # jobs since nothing was pending
        self._pending = 0
        self._running: dict[_Job, tuple[int, float]] = {}
        self._begun = 0
        self._shown = False

    def added(self, job: _Job) -> None:
        if job.shown:
            with self._lock:
                self._pending += 1
                self._total += 1

    def removed(self, job: _Job) -> None:
        if job.shown:
            with self._lock:
                self._pending -= 1
                if self._pending == 0:
                    self._total = self._begun = 0

    def started(self, job: _Job) -> None:
        if job.shown:
            with self._lock:
                self._begun += 1
                self._running[job] = (self._begun, time.monotonic())

    def ended(self, job: _Job) -> None:
        with self._lock:
            self._running.pop(job, None)
            if self._shown:
                self._shown = not _write_line("")

    def tick(self) -> None:
        with self._lock:
            if not self._running:
                return
            job, (number, start) = next(iter(self._running.items()))
            seconds = time.monotonic() - start
            if seconds >= _QUIET:
                line = f"retrograd: compiling plan {number} of {self._total} ({job.name[:40]}), {seconds:.0f} s"
                self._shown = _write_line(line) or self._shown

    def abandon(self) -> None:
        self._shown = False


def _write_line(line: str) -> bool:
    """Replaces the terminal's current line. Past sys.stderr, whose lock a daemon thread must not hold at exit."""
    try:
        fd = sys.stderr.fileno()
        if not os.isatty(fd):
            return False
        os.write(fd, b"\r\x1b[2K" + line.encode(errors="replace"))
        return True
    except (AttributeError, OSError, ValueError):
        return False


_pool = _Pool()


def _after_fork_in_child() -> None:
    global _pool
    parents, _pool = _pool, _Pool()
    parents.abandon()
    _kept.append(parents)


# Pools of ancestors: what they hold must not be destroyed in a forked child.
_kept: list[_Pool] = []

atexit.register(close)
os.register_at_fork(after_in_child=_after_fork_in_child)
