"""One folder, one process: a lock that the operating system gives up when its holder ends, however it ends."""

import errno
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchrum.lab.training.errors import RunError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK = ".lock"
"""The file in the folder that is locked; it holds the process id of the holder, and goes with it."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems without locks answer; a run there goes unprotected."""
_ATTEMPTS = 100
"""How often to make a folder whose parents other processes remove; a parent that cannot be there ends in an error."""
_BEYOND = 2**20  # Windows locks bytes, and nobody can read them: one that is not there leaves the process id readable

_held: set[int] = set()


def _close_in_child() -> None:
    for handle in _held:
        os.close(handle)  # the lock stays with the parent, and does not outlive it in a forked child
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


class FolderLock:
    """The right to write into a folder, until ``release`` or the end of the process.

    Args:
        folder: what to lock; it is made if it is not there, with its parents, and what was made goes when the lock is
            released, if nothing was written there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / LOCK
        self._made: list[Path] = []  # the innermost last
        self._handle: int | None = None

    def acquire(self) -> bool:
        """Take the lock; False if another process has it."""
        try:
            handle = self._take()
        except OSError:
            self._remove_made()
            raise
        if handle is None:
            return False
        self._handle = handle
        _held.add(handle)
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        return True

    def _take(self) -> int | None:
        """A handle of the locked file, or None if another process has it."""
        while True:
            self._make_folder()
            try:
                handle = os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
            except FileNotFoundError:  # its last holder has just removed the folder
                continue
            if not _lock(handle):
                os.close(handle)
                return None
            if self._is_there(handle):
                return handle
            os.close(handle)  # its last holder has removed the file; the lock is worth nothing

    def _make_folder(self) -> None:
        """Make the folder and its parents where they are missing, and note which were made here."""
        for attempt in range(_ATTEMPTS):
            missing = [place for place in (self.folder, *self.folder.parents) if not place.exists()]
            try:
                for place in reversed(missing):
                    place.mkdir()
                    self._made.append(place)
                return
            except FileExistsError:
                if not place.is_dir():  # a link to nowhere; a folder that another process has just made will do
                    raise
            except FileNotFoundError:  # another process has just removed a parent that it had made
                if attempt == _ATTEMPTS - 1:
                    raise

    def _is_there(self, handle: int) -> bool:
        try:
            return os.path.samestat(os.fstat(handle), os.lstat(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Give the lock up, and remove its file and the folders that were made for it and are empty."""
        if self._handle is None:
            return
        with suppress(OSError):  # the disk is gone: the kernel gives up the lock in any case
            self._path.unlink(missing_ok=True)
        self._remove_made()
        _held.discard(self._handle)
        os.close(self._handle)
        self._handle = None

    def _remove_made(self) -> None:
        with suppress(OSError):  # not empty
            while self._made:
                self._made.pop().rmdir()

    def in_use(self) -> RunError:
        """The error for a folder that another process has; it says which one, if that can be told."""
        try:
            with open(self._path, "rb") as file:
                text = file.read(20).decode("ascii", "replace").strip()
        except OSError:
            text = ""
        holder = f"process {text}" if re.fullmatch(r"\d+", text) else "another process"
        return RunError(f"{self.folder} is in use by {holder}; wait for it to end, or choose another --out.")

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()


def _lock(handle: int) -> bool:
    try:
        if sys.platform == "win32":
            os.lseek(handle, _BEYOND, os.SEEK_SET)
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
            os.lseek(handle, 0, os.SEEK_SET)
        else:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return True
        if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            return False
        raise
    return True


def holds_files(folder: Path) -> bool:
    """Whether there is anything in a folder besides a lock."""
    return folder.exists() and (not folder.is_dir() or any(path.name != LOCK for path in folder.iterdir()))


def lock_folder(folder: Path) -> FolderLock:
    """Lock a folder, whatever is in it; a RunError names the process that has it."""
    lock = FolderLock(folder)
    if not lock.acquire():
        raise lock.in_use()
    return lock


def lock_free_folder(folder: Path) -> FolderLock:
    """Lock ``folder`` or, if it is in use or not empty, the first of ``folder-2``, ``folder-3``, ... that is free."""
    count, candidate = 1, folder
    while True:
        lock = FolderLock(candidate)
        if not holds_files(candidate) and lock.acquire():
            if not holds_files(candidate):  # another process may have come and gone
                return lock
            lock.release()
        count += 1
        candidate = folder.with_name(f"{folder.name}-{count}")
