"""Raw rows of a data file, one after another, whatever it is: JSON lines (plain, gzip, zstd), Parquet, Arrow.

A row is a dict of what stands in it, or the reason why it is none. Memory holds one line, or one batch of a table.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

from hsx_host.errors import BadInput

MAX_LINE_BYTES = 64 << 20  # a line of a million tokens; anything longer is no sample, and must not fill the memory
COLUMNS = ("input_ids", "loss_mask", "messages", "conversations", "tools")

_JSON = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_BATCH = 64
_ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"
_OTHER_UNICODE = (b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")
_KINDS = (
    "a .jsonl, .jsonl.gz, .jsonl.zst, .parquet or .arrow file on the host, or a folder of save_to_disk or of .parquet"
)


def rows(path: Path) -> Iterator[dict[str, Any] | str]:
    """Every row of the file or folder, in order.

    :raises BadInput: with field ``data.path``, where it is missing, of no known kind, not a plain file, or broken.
    """
    if path.is_dir() and not path.name.endswith(_JSON):
        yield from _folder(path)
    elif path.name.endswith(".parquet"):
        yield from _parquet(path)
    elif path.name.endswith(".arrow"):
        yield from _arrow(path)
    elif path.name.endswith(_JSON):
        for line in _lines(path):
            yield parse(line)
    else:
        _bad(path, f"the name ends in none of {', '.join(_JSON)}, .parquet, .arrow, and it is no folder")


def parse(line: bytes | None) -> dict[str, Any] | str:
    """One line of JSON, or why it is no row. ``None`` stands for a line beyond MAX_LINE_BYTES."""
    if line is None:
        return f"the line is longer than {MAX_LINE_BYTES >> 20} MiB"
    if not line.strip():
        return "the line is empty"
    try:
        body = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as e:
        return f"not UTF-8: {e.reason} at byte {e.start}"
    except (ValueError, RecursionError) as e:
        return f"not JSON: {e}"
    return body if isinstance(body, dict) else f"not an object but {type(body).__name__}"


# ---------------------------------------------------------------------------------- JSON lines


def _lines(path: Path) -> Iterator[bytes | None]:
    count = 0
    try:
        with _open(path) as f:
            while line := f.readline(MAX_LINE_BYTES):
                if not count and line.startswith(_OTHER_UNICODE):
                    _bad(path, "the file is UTF-16 or UTF-32", fix="save it as UTF-8")
                if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                    while (rest := f.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                        pass
                    yield None
                else:
                    yield line
                count += 1
    except (EOFError, gzip.BadGzipFile, zlib.error) as e:
        _bad(path, f"a broken gzip file after line {count}: {e}")
    except OSError as e:
        _bad(path, f"the file can't be read: {e.strerror or e}")


def _open(path: Path) -> IO[bytes] | gzip.GzipFile:
    plain = _plain(path)
    if path.name.endswith(".gz"):
        return gzip.GzipFile(fileobj=plain, mode="rb")
    if not path.name.endswith(".zst"):
        return plain
    try:
        import zstandard
    except ImportError:
        _bad(path, "the package zstandard is missing on the host", fix="pip install zstandard under host.python")
    return io.BufferedReader(_Zstd(zstandard, plain))


class _Zstd(io.RawIOBase):
    """A zstd file as a stream, with its errors as OSError; a cut file is one (zstandard itself ends in silence)."""

    def __init__(self, zstandard: Any, source: IO[bytes]) -> None:
        self._error = zstandard.ZstdError
        self._source, self._left = source, memoryview(b"")  # a view: little of a long piece is taken at a time
        self._whole, self._make = True, zstandard.ZstdDecompressor().decompressobj
        self._frame = self._make()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            while not self._left:
                data = self._frame.unused_data if self._frame.eof else b""
                if self._frame.eof:
                    self._frame = self._make()
                    self._whole = True
                data = data or self._source.read(1 << 16)
                if not data:
                    if not self._whole:
                        raise OSError("a broken zstd file: it ends too early")
                    return 0
                self._whole = False
                self._left = memoryview(self._frame.decompress(data))
        except self._error as e:
            raise OSError(f"a broken zstd file: {e}") from None
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


def _plain(path: Path) -> IO[bytes]:
    """The file, open; a pipe or device is refused instead of waited for."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        _bad(path, "can't be read: not a plain file")
    return os.fdopen(fd, "rb")


# ---------------------------------------------------------------------------------- tables


def _folder(path: Path) -> Iterator[dict[str, Any] | str]:
    if (path / "dataset_dict.json").exists():
        splits = sorted(p.name for p in path.iterdir() if p.is_dir())
        _bad(path, "the folder holds several splits", fix=f"name one: {path}/{splits[0] if splits else 'train'}")
    if (path / "state.json").exists():
        yield from _saved(path)
    elif files := sorted(path.glob("*.parquet")):
        for file in files:
            yield from _parquet(file)
    else:
        _bad(path, "the folder holds neither a saved data set (state.json) nor .parquet files")


def _saved(path: Path) -> Iterator[dict[str, Any] | str]:
    """What ``datasets`` saved (``save_to_disk``), such as prepare-data of speculators."""
    try:
        import datasets
    except ImportError:
        _bad(path, "the package datasets is missing on the host", fix="pip install datasets under host.python")
    try:
        for file in json.loads((path / "state.json").read_bytes())["_data_files"]:
            with _plain(path / file["filename"]) as f:
                _insist_on_end(f, path / file["filename"])
        table = datasets.load_from_disk(str(path))
        kept = [name for name in COLUMNS if name in table.column_names]
        table = table.select_columns(kept).with_format("arrow")
        for batch in table.iter(batch_size=_BATCH):
            yield from map(_row, batch.to_pylist())
    except (OSError, ValueError, KeyError, TypeError) as e:
        _bad(path, f"the saved data set can't be read: {e}")


def _parquet(path: Path) -> Iterator[dict[str, Any] | str]:
    pa = _pyarrow(path)
    import pyarrow.parquet as parquet

    try:
        with _plain(path) as f, parquet.ParquetFile(f) as file:
            kept = [name for name in COLUMNS if name in file.schema_arrow.names]
            for batch in file.iter_batches(batch_size=_BATCH, columns=kept):
                yield from map(_row, batch.to_pylist())
    except (OSError, pa.ArrowException) as e:
        _bad(path, f"the Parquet file can't be read: {e}")


def _arrow(path: Path) -> Iterator[dict[str, Any] | str]:
    """An Arrow stream (as ``datasets`` writes) or an Arrow file."""
    pa = _pyarrow(path)
    try:
        with _plain(path) as f:
            is_file = f.read(6) == b"ARROW1"
            f.seek(0)
            if not is_file:
                _insist_on_end(f, path)
            reader = pa.ipc.open_file(f) if is_file else pa.ipc.open_stream(f)
            kept = [name for name in COLUMNS if name in reader.schema.names]
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
            for batch in batches:
                for at in range(0, batch.num_rows, _BATCH):
                    yield from map(_row, batch.select(kept).slice(at, _BATCH).to_pylist())
    except (OSError, pa.ArrowException) as e:
        _bad(path, f"the Arrow file can't be read: {e}")


def _insist_on_end(f: IO[bytes], path: Path) -> None:
    """BadInput where an Arrow stream lacks its end mark: cut between two batches it would read as fewer rows.

    Source: Arrow's IPC streaming format, which marks messages by 0xFFFFFFFF and the end by a message of no length.
    Streams of before 0.15 have no marks, and are not judged. The file is at its beginning again.
    """
    marked = f.read(4) == _ARROW_END[:4]
    f.seek(-min(8, f.seek(0, os.SEEK_END)), os.SEEK_END)
    ended = f.read(8) == _ARROW_END
    f.seek(0)
    if marked and not ended:
        _bad(
            path,
            "the Arrow file can't be read: it has no end mark, so rows may be missing",
            fix="copy it again, or have its writer close it",
        )


def _row(body: dict[str, Any]) -> dict[str, Any]:
    """A row of a table as JSON would have it: no columns without a value, and 0 or 1 for a mask of truth values."""
    row = {key: value for key, value in body.items() if value is not None}
    mask = row.get("loss_mask")
    if isinstance(mask, list) and set(map(type, mask)) == {bool}:
        row["loss_mask"] = [int(value) for value in mask]
    return row


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        _bad(path, "the package pyarrow is missing on the host", fix="pip install pyarrow under host.python")
    return pyarrow


def _bad(path: str | Path, what: str, fix: str = f"give {_KINDS}") -> NoReturn:
    raise BadInput(what, field="data.path", value=path, fix=fix)
