"""The C source compiled on first use by the system's compiler, and kept in the user's cache.

The object's name holds a hash of the sources, the command and the CPU, and one of the object itself: another version
or another machine builds its own, and a file that was cut short or is not ours is built anew. Objects are loaded only
from folders that nobody else may write to.

A wheel may carry objects for common kinds of CPU; those are taken first. This module imports nothing of the package, so
that the hook which builds them can use it alone.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

try:
    import grp
    import pwd
except ImportError:  # Windows
    grp = pwd = None  # type: ignore[assignment]

SOURCE = Path(__file__).parent / "scan.c"
FLAGS = (
    "-std=gnu11 -O3 -ffp-contract=fast -fno-math-errno -fno-trapping-math -fPIC -shared -fvisibility=hidden -pthread"
)
CPU_FLAGS = ("-march=native", "-mcpu=native", "")
"""What makes a compiler use all that this CPU has; the first one that it takes."""
PREBUILT = SOURCE.parent / "prebuilt"
"""What a wheel carries, if it was built with the hook of hatch_build.py."""
LEVELS: dict[str, dict[str, tuple[str, str]]] = {
    "x86_64": {
        "v4": ("-march=x86-64-v4", "avx512f avx512bw avx512cd avx512dq avx512vl avx2 fma bmi2 f16c movbe abm"),
        "v3": ("-march=x86-64-v3", "avx2 fma bmi1 bmi2 f16c movbe abm"),
        "v2": ("-march=x86-64-v2", "sse4_1 sse4_2 ssse3 popcnt cx16"),
    },
    "aarch64": {"v8": ("-march=armv8-a", "fp asimd")},
}
"""Kinds of CPU, by machine: the flag, and what the system must say that the CPU has."""
SECONDS = 300
"""After which a compiler that does not answer is given up."""


class BuildError(Exception):
    """Why there is no object to load, in words."""


@functools.cache
def load_library(double: bool) -> ctypes.CDLL | str:
    """The scan for float64 or float32, built if it has to be; or why it cannot be had."""
    try:
        return _load(double)
    except BuildError as error:
        return str(error)


def _load(double: bool) -> ctypes.CDLL:
    if grp is None:
        raise BuildError(f"it is not written for {platform.system()}")
    for path in prebuilt_paths(PREBUILT, double, cpu_features()):
        if path.is_file():
            return _open(path)
    compiler = find_compiler()
    folder = private_folder()
    key = build_key(compiler, double)
    for path in sorted(folder.glob(f"{key}-*.so")):
        if is_intact(path):
            return _open(path)
    return _open(compile_library(compiler, folder, key, double))


def prebuilt_paths(folder: Path, double: bool, features: str) -> list[Path]:
    """Where a wheel's objects for such a CPU would be, the best one first."""
    has = set(features.split())
    levels = [
        level for level, (_, needs) in LEVELS.get(platform.machine(), {}).items() if has.issuperset(needs.split())
    ]
    return [folder / f"{level}-{'float64' if double else 'float32'}-{source_key()}.so" for level in levels]


def prebuild(folder: Path) -> list[Path]:
    """Build the objects that a wheel carries, for every level of this kind of CPU; none without a compiler."""
    made = []
    try:
        compiler = find_compiler()
    except BuildError:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    for level, (cpu_flag, _) in LEVELS.get(platform.machine(), {}).items():
        for double in (False, True):
            path = folder / f"{level}-{'float64' if double else 'float32'}-{source_key()}.so"
            if run_compiler(compiler, cpu_flag, double, path) is None:
                path.chmod(0o644)
                made.append(path)
    return made


def find_compiler() -> list[str]:
    """The command of the C compiler: ``CC`` of the environment, or the first of cc, gcc and clang."""
    given = shlex.split(os.environ.get("CC", ""))
    for command in [given] if given else [["cc"], ["gcc"], ["clang"]]:
        path = shutil.which(command[0])
        if path is not None:
            return [path, *command[1:]]
    wanted = f"{given[0]!r}, which CC names," if given else "cc, gcc or clang"
    raise BuildError(f"no C compiler was found: {wanted} is not on the PATH")


def private_folder() -> Path:
    """The folder of the cache, made if need be, once it is certain that nobody else can put files there."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not cache.is_absolute():
            cache = Path.home() / ".cache"
        folder = cache / "torchrum" / "native"
        for part in (cache, folder.parent, folder):  # one by one: mkdir's own parents would follow the umask
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
    """Whether someone besides this user and root can replace what is in a folder, or a file."""
    if found.st_uid not in (os.geteuid(), 0) or (leaf and found.st_uid != os.geteuid()):
        return True
    if found.st_mode & stat.S_ISVTX and not leaf:  # as /tmp: entries belong to who made them
        return False
    if found.st_mode & stat.S_IWGRP and not is_own_group(found.st_gid):
        return True
    return bool(found.st_mode & stat.S_IWOTH)


def is_own_group(gid: int) -> bool:
    """Whether a group is this user's own, with no other member, as many systems make one for every user."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def source_key() -> str:
    """Names the C source and how it is compiled."""
    digest = hashlib.sha256(FLAGS.encode())
    for path in sorted(SOURCE.parent.glob("*.[ch]")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def build_key(compiler: list[str], double: bool) -> str:
    """Names everything that an object depends on."""
    digest = hashlib.sha256(source_key().encode())
    program = Path(compiler[0]).resolve()
    version = (str(program), program.stat().st_size, program.stat().st_mtime_ns)  # asking it would cost a process
    digest.update(repr((version, compiler, CPU_FLAGS, double, platform.machine(), cpu_features())).encode())
    return digest.hexdigest()[:32]


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What the CPU can do, as far as the system says."""
    try:
        first, _, _ = cpuinfo.read_text().partition("\n\n")
    except OSError:
        return platform.processor()
    words = ("vendor_id", "model", "flags", "features", "cpu implementer", "cpu part", "isa")
    return "\n".join(
        line for line in first.splitlines() if line.lower().startswith(words) and "mhz" not in line.lower()
    )


def is_intact(path: Path) -> bool:
    """Whether an object is a file of this user alone and has the content that its name says."""
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or others_may_write(found, leaf=True):
            return False
        return path.stem.rpartition("-")[2] == hashlib.sha256(path.read_bytes()).hexdigest()[:32]
    except OSError:
        return False


def compile_library(compiler: list[str], folder: Path, key: str, double: bool) -> Path:
    """Build the object aside, then give it its name in one step: several processes may do so at once."""
    complaints = []
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as inside:
            made = Path(inside) / "scan.so"
            for cpu_flag in CPU_FLAGS:
                complaints.append(run_compiler(compiler, cpu_flag, double, made))
                if complaints[-1] is None:
                    digest = hashlib.sha256(made.read_bytes()).hexdigest()[:32]
                    return made.replace(folder / f"{key}-{digest}.so")
    except OSError as error:
        raise BuildError(f"{compiler[0]} could not compile it: {error}") from error
    raise BuildError(f"{compiler[0]} could not compile it: {complaints[0]}")


def run_compiler(compiler: list[str], cpu_flag: str, double: bool, made: Path) -> str | None:
    """Compile the source for one kind of CPU; the first line of the complaint, or None."""
    flags = [*FLAGS.split(), *cpu_flag.split(), *(["-DUSE_DOUBLE"] if double else [])]
    command = [*compiler, *flags, str(SOURCE), "-o", str(made)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        return str(error)
    if done.returncode == 0 and made.is_file():
        made.chmod(0o600)
        return None
    return next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")


def _open(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        library.torchrum_scan.restype = ctypes.c_int
        return library
    except (OSError, AttributeError) as error:  # a cache without permission to execute, or a compiler that is none
        raise BuildError(f"what was compiled cannot be loaded: {error}") from error
