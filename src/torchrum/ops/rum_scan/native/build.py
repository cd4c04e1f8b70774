"""Compilation of the C source on first use, by the system's compiler, with a cache in the user's home folder.

The object's name contains a hash of the sources, the command and the CPU, and a hash of the object itself: another
version or machine builds its own object, and a damaged or foreign file is built again. Objects are loaded only from
folders that no other user may write to. One process compiles at a time, and the others wait for its object. A new
object is added to the cache only after a child process has loaded it, since loading a damaged one can crash the
process.

A wheel may contain objects for common kinds of CPU, which are tried first. This module imports nothing else from the
package, so that the build hook for these objects can import it alone.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
    import grp
    import pwd
except ImportError:  # Windows
    fcntl = grp = pwd = None  # type: ignore[assignment]

SOURCE = Path(__file__).parent / "scan.c"
FLAGS = (
    "-std=gnu11 -O3 -ffp-contract=fast -fno-math-errno -fno-trapping-math -fPIC -shared -fvisibility=hidden -pthread"
)
CPU_FLAGS = ("-march=native", "-mcpu=native", "")
"""Flags that enable all features of this CPU; the first one that the compiler accepts is used."""
PREBUILT = SOURCE.parent / "prebuilt"
"""Folder of the objects in a wheel that was built with the hook of hatch_build.py."""
LEVELS: dict[str, dict[str, tuple[str, str]]] = {
    "x86_64": {
        "v4": ("-march=x86-64-v4", "avx512f avx512bw avx512cd avx512dq avx512vl avx2 fma bmi2 f16c movbe abm"),
        "v3": ("-march=x86-64-v3", "avx2 fma bmi1 bmi2 f16c movbe abm"),
        "v2": ("-march=x86-64-v2", "sse4_1 sse4_2 ssse3 popcnt cx16"),
    },
    "aarch64": {"v8": ("-march=armv8-a", "fp asimd")},
}
"""Kinds of CPU by machine, each with its compiler flag and the features that the system must report."""
SECONDS = 60.0
"""Limit on the time that a process spends on one object: waiting for others, and all attempts to compile."""
LOAD = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).torchrum_scan; print('loaded')"
"""Program of the child process that loads a new object."""


class BuildError(Exception):
    """Error with the reason why there is no object to load."""


@functools.cache
def load_library(double: bool) -> ctypes.CDLL | str:
    """Return the library for float64 or float32, built if needed, or the reason why there is none."""
    try:
        return _load(double)
    except BuildError as error:
        return str(error)
    except OSError as error:  # the compiler or the cache folder has just been removed
        return f"it cannot be compiled: {error}"


def _load(double: bool) -> ctypes.CDLL:
    if grp is None:
        raise BuildError(f"it is not written for {platform.system()}")
    for path in prebuilt_paths(PREBUILT, double, cpu_features()):
        if path.is_file():
            return _open(path)
    compiler = find_compiler()
    folder = private_folder()
    key = build_key(compiler, double)
    deadline = time.monotonic() + SECONDS
    if (kept := find_intact(folder, key)) is not None:
        return _open(kept)
    with one_at_a_time(folder, deadline):
        return _open(find_intact(folder, key) or compile_library(compiler, folder, key, double, deadline))


def find_intact(folder: Path, key: str) -> Path | None:
    """Find an intact object in the cache."""
    return next((path for path in sorted(folder.glob(f"{key}-*.so")) if is_intact(path)), None)


@contextlib.contextmanager
def one_at_a_time(folder: Path, deadline: float) -> Iterator[None]:
    """Hold the lock of the cache folder; without file locks, several processes may compile at once."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError(f"another process compiles it, for more than {SECONDS:g} seconds") from None
                time.sleep(0.05)
            except OSError:
                break
        yield
    finally:
        os.close(handle)


def prebuilt_paths(folder: Path, double: bool, features: str) -> list[Path]:
    """Return the possible paths of a wheel's objects for a CPU with ``features``, best first."""
    has = set(features.split())
    levels = [
        level for level, (_, needs) in LEVELS.get(platform.machine(), {}).items() if has.issuperset(needs.split())
    ]
    return [folder / f"{level}-{'float64' if double else 'float32'}-{source_key()}.so" for level in levels]


def prebuild(folder: Path) -> list[Path]:
    """Build the objects for a wheel, for every level of this kind of CPU; none without a compiler."""
    made = []
    try:
        compiler = find_compiler()
    except BuildError:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    for level, (cpu_flag, _) in LEVELS.get(platform.machine(), {}).items():
        for double in (False, True):
            path = folder / f"{level}-{'float64' if double else 'float32'}-{source_key()}.so"
            if run_compiler(compiler, cpu_flag, double, path, time.monotonic() + SECONDS) is None:
                path.chmod(0o644)
                made.append(path)
    return made


def find_compiler() -> list[str]:
    """Return the command of the C compiler: ``CC`` from the environment, or the first of cc, gcc and clang."""
    try:
        given = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:  # an open quote, or a backslash at the end
        raise BuildError(f"CC={os.environ['CC']!r} is not a command: {error}") from error
    for command in [given] if given else [["cc"], ["gcc"], ["clang"]]:
        path = shutil.which(command[0])
        if path is not None:
            return [path, *command[1:]]
    wanted = f"{given[0]!r}, which CC names," if given else "cc, gcc or clang"
    raise BuildError(f"no C compiler was found: {wanted} is not on the PATH")


def private_folder() -> Path:
    """Return the cache folder, created if needed, after checking that no other user can write to it."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not cache.is_absolute():
            cache = Path.home() / ".cache"
        folder = cache / "torchrum" / "native"
        for part in (cache, folder.parent, folder):  # one by one: mkdir(parents=True) would apply the umask to parents
            part.mkdir(mode=0o700, parents=part == cache, exist_ok=True)
        folder = folder.resolve(strict=True)
        parts = [folder, *folder.parents]
        writers = [part for part in parts if others_may_write(part.stat(), leaf=part == folder)]
    except (OSError, RuntimeError) as error:
        raise BuildError(f"the cache folder cannot be used: {error}") from error
    if writers:
        raise BuildError(f"others may write to {writers[0]}, so that nothing is loaded from {folder}")
    return folder


def others_may_write(found: os.stat_result, *, leaf: bool) -> bool:
    """Return whether a user other than this one and root can write to a file, or replace entries of a folder."""
    if found.st_uid not in (os.geteuid(), 0) or (leaf and found.st_uid != os.geteuid()):
        return True
    if found.st_mode & stat.S_ISVTX and not leaf:  # sticky, as /tmp: only their owner can replace entries
        return False
    if found.st_mode & stat.S_IWGRP and not is_own_group(found.st_gid):
        return True
    return bool(found.st_mode & stat.S_IWOTH)


def is_own_group(gid: int) -> bool:
    """Return whether a group is this user's private group, without other members."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def source_key() -> str:
    """Return a hash of the C source and the compiler flags."""
    digest = hashlib.sha256(FLAGS.encode())
    for path in sorted(SOURCE.parent.glob("*.[ch]")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def build_key(compiler: list[str], double: bool) -> str:
    """Return a hash of everything that an object depends on."""
    digest = hashlib.sha256(source_key().encode())
    program = Path(compiler[0]).resolve()
    version = (str(program), program.stat().st_size, program.stat().st_mtime_ns)  # no process for ``cc --version``
    digest.update(repr((version, compiler, CPU_FLAGS, double, platform.machine(), cpu_features())).encode())
    return digest.hexdigest()[:32]


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's model and features as reported by the system."""
    try:
        first, _, _ = cpuinfo.read_text().partition("\n\n")
    except OSError:
        return platform.processor()
    words = ("vendor_id", "model", "flags", "features", "cpu implementer", "cpu part", "isa")
    return "\n".join(
        line for line in first.splitlines() if line.lower().startswith(words) and "mhz" not in line.lower()
    )


def is_intact(path: Path) -> bool:
    """Return whether only this user can write to an object and its content matches the hash in its name."""
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or others_may_write(found, leaf=True):
            return False
        return path.stem.rpartition("-")[2] == hashlib.sha256(path.read_bytes()).hexdigest()[:32]
    except OSError:
        return False


def compile_library(compiler: list[str], folder: Path, key: str, double: bool, deadline: float) -> Path:
    """Build an object in a temporary folder, load it in a child process and move it into the cache atomically."""
    complaints: list[str] = []
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as inside:
            made = Path(inside) / "scan.so"
            for cpu_flag in CPU_FLAGS:
                complaint = run_compiler(compiler, cpu_flag, double, made, deadline) or find_defect(made, deadline)
                if complaint is None:
                    digest = hashlib.sha256(made.read_bytes()).hexdigest()[:32]
                    return made.replace(folder / f"{key}-{digest}.so")
                complaints.append(complaint)
                made.unlink(missing_ok=True)
    except OSError as error:
        complaints.insert(0, str(error))
    raise BuildError(f"{compiler[0]} could not compile it: {complaints[0]}")


def run_compiler(compiler: list[str], cpu_flag: str, double: bool, made: Path, deadline: float) -> str | None:
    """Compile the source for one kind of CPU and return the first line of the compiler's error, or None."""
    flags = [*FLAGS.split(), *cpu_flag.split(), *(["-DUSE_DOUBLE"] if double else [])]
    code, text = run_until(deadline, [*compiler, *flags, str(SOURCE), "-o", str(made)])
    if code == "exit code 0" and made.is_file():
        made.chmod(0o600)
        return None
    return next(iter(text.strip().splitlines()), code)


def find_defect(made: Path, deadline: float) -> str | None:
    """Load an object in a child process and return the reason if that failed, or None."""
    if not sys.executable or hasattr(sys, "frozen"):  # there is no interpreter to start
        return None
    code, text = run_until(deadline, [sys.executable, "-I", "-S", "-c", LOAD, str(made)])
    if text.strip() == "loaded":
        return None
    return f"what was compiled cannot be loaded: {next(iter(reversed(text.strip().splitlines())), code)}"


def run_until(deadline: float, command: list[str]) -> tuple[str, str]:
    """Run a command and return its exit status and its output. At the deadline, kill it and its children."""
    with tempfile.TemporaryFile() as output:  # reading a pipe would block until every grandchild has closed it
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(max(0.0, deadline - time.monotonic()))
            ended = f"exit code {code}" if code >= 0 else f"it was killed by signal {-code}"
        except subprocess.TimeoutExpired:
            ended = f"it did not end within {SECONDS:g} seconds"
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        text = output.read(100_000).decode(errors="replace") if process.returncode >= 0 else ""
    return ended, "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


def _open(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        library.torchrum_scan.restype = library.torchrum_gated_scan.restype = ctypes.c_int
        return library
    except (OSError, AttributeError) as error:  # a cache mounted noexec, or a command that is not a compiler
        raise BuildError(f"what was compiled cannot be loaded: {error}") from error
