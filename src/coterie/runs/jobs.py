"""Run jobs in parallel, in worker processes that share the cores of this machine."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

from coterie.core.errors import CoterieError, out_of_memory
from coterie.execution.looped import cores, end_with_parent, share_cores
from coterie.runs.stopping import Stopped, stoppable

log = logging.getLogger("coterie")
GRACE = 5.0  # seconds for a worker to stop its own processes
KILLED = -9  # exit code of a process that the system killed, for example for lack of memory
LOOK = 0.2  # seconds between checks for a stop signal
KEPT = "finished results are kept, and the same command continues"
ENDING = "\ncoterie: stopping; press Ctrl-C or send the signal again to stop at once\n"


class JobSpec(NamedTuple):
    title: str
    content: Any  # argument of the work function


Work = Callable[[Any], str]  # returns a line to print; workers import it, so it is a function of a module
Answer = tuple[bool, str]  # whether the job succeeded, and a line to print


def side_by_side(specs: Sequence[JobSpec], work: Work, jobs: int, say: Callable[[str], None]) -> list[str]:
    """Run all jobs, started in this order. Returns the failures, which do not stop other jobs."""
    crew = Crew(specs, work, jobs, say)
    with stoppable(ENDING) as stop_signal:
        try:
            while busy := crew.busy():
                ready = wait([worker.line for worker in busy], LOOK)
                if stop := stop_signal():
                    raise Stopped(f"stopped; {KEPT}", stop)
                for worker in busy:
                    if worker.line in ready:
                        crew.receive(worker)
        finally:
            end(crew.workers)
    return crew.failures.lines()


class Failures:
    """Errors of jobs. An error that stops many jobs is logged once."""

    def __init__(self) -> None:
        self.titles: dict[str, list[str]] = {}  # error -> titles of the jobs that it stopped

    def note(self, title: str, error: str) -> None:
        if error not in self.titles:
            log.warning("%s: %s", title, error)
        self.titles.setdefault(error, []).append(title)

    def lines(self) -> list[str]:
        return [
            f"{first}{f' and {len(others)} more' if others else ''}: {error}"
            for error, (first, *others) in self.titles.items()
        ]


class Crew:
    """The workers and the jobs that are left."""

    def __init__(self, specs: Sequence[JobSpec], work: Work, jobs: int, say: Callable[[str], None]) -> None:
        self.specs, self.work, self.jobs, self.say = specs, work, jobs, say
        self.waiting = deque(range(len(specs)))
        self.workers: list[Worker] = []
        self.failures = Failures()

    def busy(self) -> list[Worker]:
        """Give jobs to idle workers; returns the workers that have one."""
        while self.waiting and len(self.workers) < self.jobs:
            self.workers.append(Worker(self.work, self.jobs))
        for worker in self.workers:
            if self.waiting and worker.number is None:
                worker.begin(self.waiting[0], self.specs[self.waiting[0]].content)
                self.report(self.waiting.popleft(), "starts")
        return [worker for worker in self.workers if worker.number is not None]

    def receive(self, worker: Worker) -> None:
        """Take the answer of a worker that finished its job or died."""
        number = worker.number
        assert number is not None
        succeeded, line = worker.answer()
        if not worker.process.is_alive():
            self.workers.remove(worker)
        if succeeded:
            self.report(number, line)
            return
        self.failures.note(self.specs[number].title, line)

    def report(self, number: int, line: str) -> None:
        self.say(f"{number + 1}/{len(self.specs)}  {self.specs[number].title}  {line}")


class Worker:
    """A process that does one job after another."""

    def __init__(self, work: Work, jobs: int) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process cannot use the GPU
        self.line, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, work, jobs))
        self.number: int | None = None  # index of its current job
        with signals_blocked():
            self.process.start()
        theirs.close()  # so that the connection closes when the worker ends

    def begin(self, number: int, content: Any) -> None:
        self.number = number
        with contextlib.suppress(OSError):  # the worker died; reading the connection reports it
            self.line.send(content)

    def answer(self) -> Answer:
        self.number = None
        try:
            answer: Answer = self.line.recv()
        except (EOFError, OSError):
            end([self])
            return False, f"{death(self.process.exitcode)}; the same command runs it again"
        return answer


def death(code: int | None) -> str:
    if code == KILLED:
        return "its process was killed (out of memory? try fewer --jobs)"
    return f"its process ended with code {code}"


def end(workers: Sequence[Worker]) -> None:
    """Ask busy workers to stop, so that they stop their own processes; then kill those that have not."""
    for worker in workers:
        worker.line.close()  # idle workers wait for this
        if worker.number is not None:
            worker.process.terminate()
    deadline = time.monotonic() + GRACE
    try:
        for worker in workers:
            worker.process.join(max(deadline - time.monotonic(), 0))
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Processes started here ignore the terminal's signals; the process that started them stops them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # its start would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# In the worker process.


def serve(line: Connection, work: Work, jobs: int) -> None:
    """Do jobs until the connection closes."""
    try:
        signal.signal(signal.SIGTERM, leave)
        end_with_parent()
        share_cores(jobs)
        torch.set_num_threads(cores())
        for content in arriving(line):
            answer = attempt(work, content)
            torch.cuda.empty_cache()  # for other workers
            with contextlib.suppress(ConnectionError):
                line.send(answer)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # an exception while torch exits would be printed
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
            raise
        os._exit(128 + signal.SIGTERM)  # asked to stop; a clean exit of torch takes a second and may fail


def arriving(line: Connection) -> Iterator[Any]:
    """Jobs, until the parent closes the connection or dies."""
    parent = multiprocessing.parent_process()
    while parent is not None and parent.is_alive():
        try:
            content = line.recv()
        except (EOFError, ConnectionError):
            return
        yield content


def leave(number: int, frame: Any) -> None:
    """Stop as on Ctrl-C; ignore further requests."""
    signal.signal(number, signal.SIG_IGN)
    signal.default_int_handler(number, frame)


def attempt(work: Work, content: Any) -> Answer:
    try:
        return True, work(content)
    except CoterieError as error:
        return False, str(error)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return False, "out of memory; try fewer --jobs, the same command runs it again"
