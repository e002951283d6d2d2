"""Pieces of work done several at a time, by worker processes that share the cores of this machine."""

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

from coterie.clients.looped import cores, end_with_parent, share_cores
from coterie.core.errors import CoterieError, out_of_memory
from coterie.federation.stopping import Stopped, stoppable

log = logging.getLogger("coterie")
GRACE = 5.0  # seconds that a worker has to end what it started
KILLED = -9  # how a process ends that the system has no memory for
LOOK = 0.2  # seconds between looks at whether somebody asked to stop
KEPT = "what was finished is kept, and the same command goes on"
ENDING = "\ncoterie: stops; Ctrl-C once more stops at once\n"


class Task(NamedTuple):
    title: str
    content: Any  # what the work is given


Work = Callable[[Any], str]  # gives back what to say of it; a worker imports it, so it is a function of a module
Answer = tuple[bool, str]  # whether it went well, and what to say of it


def side_by_side(tasks: Sequence[Task], work: Work, jobs: int, say: Callable[[str], None]) -> list[str]:
    """All tasks, begun in this order. What went wrong is given back, and stops nothing else."""
    crew = Crew(tasks, work, jobs, say)
    with stoppable(ENDING) as asked:
        try:
            while busy := crew.busy():
                ready = wait([worker.line for worker in busy], LOOK)
                if stop := asked():
                    raise Stopped(f"stopped; {KEPT}", stop)
                for worker in busy:
                    if worker.line in ready:
                        crew.hear(worker)
        finally:
            end(crew.workers)
    return crew.failures.told()


class Failures:
    """What went wrong. An error that stops many tasks is told once."""

    def __init__(self) -> None:
        self.titles: dict[str, list[str]] = {}  # error -> the tasks that it stopped

    def note(self, title: str, error: str) -> None:
        if error not in self.titles:
            log.warning("%s: %s", title, error)
        self.titles.setdefault(error, []).append(title)

    def told(self) -> list[str]:
        return [
            f"{first}{f' and {len(others)} more' if others else ''}: {error}"
            for error, (first, *others) in self.titles.items()
        ]


class Crew:
    """The workers, and what is left for them to do."""

    def __init__(self, tasks: Sequence[Task], work: Work, jobs: int, say: Callable[[str], None]) -> None:
        self.tasks, self.work, self.jobs, self.say = tasks, work, jobs, say
        self.waiting = deque(range(len(tasks)))
        self.workers: list[Worker] = []
        self.failures = Failures()

    def busy(self) -> list[Worker]:
        """Those at work, once everybody has something to do, or nothing is left."""
        while self.waiting and len(self.workers) < self.jobs:
            self.workers.append(Worker(self.work, self.jobs))
        for worker in self.workers:
            if self.waiting and worker.task is None:
                worker.begin(self.waiting[0], self.tasks[self.waiting[0]].content)
                self.tell(self.waiting.popleft(), "begins")
        return [worker for worker in self.workers if worker.task is not None]

    def hear(self, worker: Worker) -> None:
        """A task is done, or its worker is dead."""
        number = worker.task
        assert number is not None
        well, told = worker.answer()
        if not worker.process.is_alive():
            self.workers.remove(worker)
        if well:
            self.tell(number, told)
            return
        self.failures.note(self.tasks[number].title, told)

    def tell(self, number: int, told: str) -> None:
        self.say(f"{number + 1}/{len(self.tasks)}  {self.tasks[number].title}  {told}")


class Worker:
    """A process that does one task after the other."""

    def __init__(self, work: Work, jobs: int) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
        self.line, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, work, jobs))
        self.task: int | None = None  # which it is at
        with unheard():
            self.process.start()
        theirs.close()  # so that the line ends when the worker does

    def begin(self, task: int, content: Any) -> None:
        self.task = task
        with contextlib.suppress(OSError):  # it is dead: the line says so when it is read
            self.line.send(content)

    def answer(self) -> Answer:
        self.task = None
        try:
            answer: Answer = self.line.recv()
        except (EOFError, OSError):
            end([self])
            return False, f"{death(self.process.exitcode)}; the same command runs it again"
        return answer


def death(code: int | None) -> str:
    if code == KILLED:
        return "its process was killed (out of memory? Fewer --jobs need less)"
    return f"its process ended with code {code}"


def end(workers: Sequence[Worker]) -> None:
    """Those at work are asked to, so that they end the processes of their own; who does not hear is killed."""
    for worker in workers:
        worker.line.close()  # what those without work wait for
        if worker.task is not None:
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
def unheard() -> Iterator[None]:
    """Processes that start here do not hear what a terminal sends to all: they are ended by who started them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # it would undo this when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# In the worker.


def serve(line: Connection, work: Work, jobs: int) -> None:
    """Do what comes until nothing does."""
    try:
        signal.signal(signal.SIGTERM, leave)
        end_with_parent()
        share_cores(jobs)
        for content in arriving(line):
            torch.set_num_threads(cores())  # again: clients one after the other have taken one
            answer = attempt(work, content)
            torch.cuda.empty_cache()  # for the others
            with contextlib.suppress(ConnectionError):
                line.send(answer)
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
            raise
        os._exit(128 + signal.SIGTERM)  # asked to leave; in order it takes torch a second, and things may go wrong


def arriving(line: Connection) -> Iterator[Any]:
    """What comes, as long as there is somebody to send it."""
    parent = multiprocessing.parent_process()
    while parent is not None and parent.is_alive():
        try:
            content = line.recv()
        except (EOFError, ConnectionError):
            return
        yield content


def leave(number: int, frame: Any) -> None:
    """As on Ctrl-C, once: what is asked twice is not meant twice."""
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
        return False, "there is not enough memory; fewer --jobs need less, and the same command runs it again"
