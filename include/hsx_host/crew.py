"""The threads that ask for a shard's samples, several in flight, and publish what is whole.

A sample is published by fsync, rename and a synced line in the manifest, in that order, so that a crash at any moment
loses at most what was in flight. Whatever waits to be published goes together: one sync of the folder and one of the
manifest serve all of it. What fails is tried again, then gets its line in the failures.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from hsx_host.client import Captured, Client, SampleFault, ServerGone
from hsx_host.dataset import Sample
from hsx_host.formats import Format
from hsx_host.manifest import Failed, Ledger, Published
from hsx_host.progress import Progress, log
from hsx_host.shards import ShardFiles, ShardInput, sync_folder

_STOP_WAIT_S = 15.0
Whole = tuple[Path, Published, int]  # an unpublished file, its line for the manifest, the sample's position


class Crew:
    """Of one shard and one call. Samples are named by their position in the shard's input.

    :param tries: how often a sample is asked for before it has failed.
    :param left: how many samples get a verdict in this call (for progress).
    :param enough: asked before each sample; once it says yes, what is in flight is finished and nothing else begun.
    """

    def __init__(
        self,
        client: Client,
        form: Format,
        files: ShardFiles,
        given: ShardInput,
        *,
        tries: int,
        left: int,
        enough: Callable[[], bool],
    ) -> None:
        self._enough = enough
        self._client, self._form, self._input, self._tries_allowed = client, form, given, tries
        self._files = files
        self._manifest: Ledger[Published] = Ledger(files.manifest)
        self._failures: Ledger[Failed] = Ledger(files.failures)
        self._progress = Progress("extract", left)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # something is to do again, or nothing is left, or stop
        self._publishing = threading.Lock()  # taken before the other one
        self._whole: queue.SimpleQueue[Whole | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()  # one entry a thread
        self._todo: deque[int] = deque()
        self._tries: dict[int, int] = {}
        self._phase_left = 0
        self.flying: set[int] = set()  # asked for and not answered; what it holds after an error was in flight then
        self.left = left  # samples without a verdict
        self.published: dict[int, Published] = {}
        self.failed: dict[int, Failed] = {}

    @property
    def tokens(self) -> int:
        """Tokens published so far."""
        return sum(line.tokens for line in list(self.published.values()))

    def run(self, todo: Sequence[int], count: int) -> None:
        """Samples with at most ``count`` in flight, until each has its verdict or it is enough.

        :raises ServerGone: or what else is no sample's fault (``NoSpace``, OSError); nothing is published any more.
        """
        self._todo, self._phase_left = deque(todo), len(todo)
        threads = [threading.Thread(target=self._worker, daemon=True) for _ in range(max(1, min(count, len(todo))))]
        publisher = threading.Thread(target=self._publisher, daemon=True)
        try:
            for thread in (*threads, publisher):
                thread.start()
            self._watch(len(threads))
            self._whole.put(None)
            self._watch(1)
        except BaseException:
            self._halt()
            self._whole.put(None)
            raise
        finally:
            if any(t.is_alive() for t in threads):
                self._client.abort()
            end = time.monotonic() + _STOP_WAIT_S
            for thread in (*threads, publisher):
                thread.join(max(0.0, end - time.monotonic()))

    def fail(self, i: int, reason: str, tries: int) -> None:
        """A sample's end in the failures."""
        line = failed_line(self._input.sample(i), reason, tries)
        self._failures.append(line)
        self.failed[line.index] = line

    def close(self) -> None:
        """Nothing is appended any more once this returns: the threads look at ``_stop`` under their locks."""
        self._halt()
        self._manifest.close()
        self._failures.close()

    def _halt(self) -> None:
        with self._publishing, self._lock:
            self._stop.set()
            self._changed.notify_all()

    def _watch(self, threads: int) -> None:
        """Until every thread has ended: tell progress. The first error of a thread that is no sample's ends all."""
        while threads:
            self._tell()
            try:
                error = self._ended.get(timeout=1)
                threads -= 1
            except queue.Empty:
                if self._client.server_lives():
                    continue
                error = ServerGone("the extraction server is gone: a process of it has ended")
            if error is not None:
                self._halt()
                raise error
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            done, size = self._progress.total - self.left, sum(line.bytes for line in self.published.values())
        self._progress.update(done, tokens=self.tokens, bytes=size)

    def _worker(self) -> None:
        try:
            while (i := self._next()) is not None:
                self._one(i)
            self._ended.put(None)
        except Exception as e:
            self._ended.put(e)

    def _next(self) -> int | None:
        """A sample to ask for; waits while others' samples may still come back for another try."""
        with self._lock:
            while self._phase_left and not self._stop.is_set() and not self._enough():
                if self._todo:
                    i = self._todo.popleft()
                    self.flying.add(i)
                    return i
                self._changed.wait(1)
        return None

    def _one(self, i: int) -> None:
        sample = self._input.sample(i)
        try:
            captured = self._client.capture(sample)
        except SampleFault as fault:
            self._faulty(i, sample, fault)
            return
        self._whole.put((captured.path, self._line(sample, captured), i))

    def _faulty(self, i: int, sample: Sample, fault: SampleFault) -> None:
        with self._lock:
            if self._stop.is_set():
                return  # its request was aborted by us
            self.flying.discard(i)
            tries = self._tries[i] = self._tries.get(i, 0) + 1
            if not fault.final and tries < self._tries_allowed:
                log(f"row {sample.row}, try {tries} of {self._tries_allowed}: {fault.reason}")
                self._todo.append(i)
                self._changed.notify()
                return
            self.fail(i, fault.reason, tries)
            self._settle()

    def _settle(self) -> None:
        self.left -= 1
        self._phase_left -= 1
        if not self._phase_left:
            self._changed.notify_all()

    def _line(self, sample: Sample, captured: Captured) -> Published:
        """The manifest's line of a sample whose data is on the disk from here on."""
        fd = os.open(captured.path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        return Published(
            index=sample.row,
            tokens=len(sample.ids),
            file=f"{self._form.FOLDER}/{self._form.file_name(sample.row)}",
            bytes=captured.bytes,
            ids_hash=sample.hash.hex(),
            crc32=captured.crc32,
            next_token=captured.next_token,
            rid=captured.rid,
            time=time.time(),
        )

    def _publisher(self) -> None:
        """Publish what is whole, as much at a time as has come meanwhile, until the queue's end."""
        more = True
        while more:
            batch = [self._whole.get()]
            while not self._whole.empty():
                batch.append(self._whole.get())
            more = None not in batch
            try:
                self._publish([whole for whole in batch if whole is not None])
            except Exception as e:
                self._ended.put(e)
                return
        self._ended.put(None)

    def _publish(self, batch: list[Whole]) -> None:
        """Names, then lines: no line, no file. What has a final name is in the manifest, or goes again."""
        with self._publishing:
            if self._stop.is_set():
                for path, _, _ in batch:
                    path.unlink(missing_ok=True)
                return
            named: list[Path] = []
            try:
                for path, line, _ in batch:
                    final = self._files.dataset / line.file
                    final.parent.mkdir(parents=True, exist_ok=True)
                    path.replace(final)
                    named.append(final)
                for folder in {final.parent for final in named}:
                    sync_folder(folder)
                self._manifest.append(*(line for _, line, _ in batch))
            except OSError:
                for final in named:
                    final.unlink(missing_ok=True)
                raise
            with self._lock:
                for _, line, i in batch:
                    self.flying.discard(i)
                    self.published[line.index] = line
                    self._settle()


def failed_line(sample: Sample, reason: str, tries: int) -> Failed:
    """A sample's line of the failures, told to the log as well."""
    log(f"row {sample.row} failed after {tries} tries: {reason}")
    return Failed(sample.row, len(sample.ids), sample.hash.hex(), reason, tries, time.time())
