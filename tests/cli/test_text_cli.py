"""A text of one's own trains, is scored and is continued with one command each."""

import json

import pytest

from texts import small_text
from torchrum.cli import main
from torchrum.lab.models import CharModel
from torchrum.lab.recipes import load_recipe
from torchrum.lab.tasks import CharLM
from torchrum.lab.training import load_model, read_config
from torchrum.lab.training.checkpoint import checkpoint_step
from torchrum.lab.training.evaluation import read_looks
from torchrum.paper.ledger import read_ledger
from torchrum.paper.ledger.entries import changes

SMALL = "--steps 6 --eval_every 3 --checkpoint_every 3 --model.hidden_size 16 --model.embedding_size 8 --device cpu"
LANES = "--batch_size 8 --task.lanes 8 --task.segment 20 --task.validation_lanes 4"


@pytest.fixture(scope="module", autouse=True)
def no_curve():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchrum.paper.plots.run.draw_curve", lambda run: None)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on a small text, trained by one command."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "book.txt").write_bytes(small_text(4000))
    words = f"train char-rum --data {folder / 'book.txt'} --out {folder} {SMALL} {LANES}"
    assert main(words.split()) == 0
    return folder / "char-rum"


def test_a_recorded_run_names_the_text_and_not_its_alphabet(run, tmp_path, capsys):
    assert main(["eval", str(run), "--device", "cpu"]) == 0
    assert main(["record", str(run), "--results", str(tmp_path), "--commit", "0123456789abcdef"]) == 0
    capsys.readouterr()
    assert main(["table", "--results", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    digest = read_config(run).task.sha256
    assert f"**character language modelling, book.txt (sha256 {digest[:8]})**" in table
    assert "`torchrum train char-rum --data book.txt " in table
    assert "task.symbols" not in table and digest not in table


def test_a_run_says_which_text_it_reads(tmp_path, capsys):
    (tmp_path / "book.txt").write_bytes(small_text(4000))
    words = f"train char-rum --data {tmp_path / 'book.txt'} --out {tmp_path} {SMALL} {LANES}"
    assert main(words.split()) == 0
    assert "\nreading book.txt, 3,627 characters to train on; loss in nats per character; " in capsys.readouterr().err
    assert load_recipe("char-rum").task.source == "Penn Treebank (ptb), 5,101,618 characters to train on"


def test_every_character_of_the_test_part_is_scored(run, capsys):
    assert main(["eval", str(run), "--json", "--device", "cpu"]) == 0
    scores = json.loads(capsys.readouterr().out)
    task = read_config(run).task
    assert scores["symbols"] == task.facts.sizes[2] == 201
    assert scores["bits"] == pytest.approx(scores["bpc"] * 201)
    assert main(["eval", str(run), "--split", "validation", "--device", "cpu"]) == 0
    assert "word_perplexity" not in capsys.readouterr().out  # it is comparable on Penn Treebank alone


def test_every_look_at_the_test_set_is_written_down_and_recorded(run, capsys, tmp_path):
    looks = len(read_looks(run))
    assert main(["eval", str(run), "--device", "cpu"]) == 0
    assert main(["eval", str(run), "--device", "cpu", "--split", "validation"]) == 0
    assert len(read_looks(run)) == looks + 1
    assert main(["record", str(run), "--results", str(tmp_path), "--commit", "abc1234"]) == 0
    assert len(read_looks(run)) == looks + 1  # known already
    (entry,) = read_ledger(tmp_path)
    assert entry.steps == 6 and entry.test["step"] == checkpoint_step(run, "best")
    assert entry.test["bpc"] == pytest.approx(read_looks(run)[-1].scores["bpc"], rel=1e-5)
    assert entry.tested == [look.date for look in read_looks(run)]
    assert main(["eval", str(run), "--device", "cpu", "--dynamic", "lr=1e-3,segment=25"]) == 0
    assert "dynamic evaluation (segment 25, lr 0.001" in capsys.readouterr().out
    assert main(["record", str(run), "--results", str(tmp_path / "dynamic"), "--commit", "abc1234"]) == 0
    (entry,) = read_ledger(tmp_path / "dynamic")
    assert entry.test["dynamic_bpc"] != entry.test["bpc"] and len(entry.tested) == looks + 2
    capsys.readouterr()
    assert main(["table", "char", "--results", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert "| test bits per character |" in table and f"| {entry.test['bpc']:.4f} |" in table
    (run / "test.json").unlink()
    assert main(["record", str(run), "--results", str(tmp_path / "again"), "--commit", "abc1234"]) == 1
    assert f"run torchrum eval {run} first" in capsys.readouterr().err
    assert not read_looks(run)  # recording evaluates nothing


def test_the_best_checkpoint_is_told_from_the_last(tmp_path, capsys):
    """After step 3 the rate is a thousand times as high: the last model is worse, and only the best one is recorded."""
    (tmp_path / "book.txt").write_bytes(small_text(4000))
    words = f"train char-rum --data {tmp_path / 'book.txt'} --out {tmp_path} {SMALL} {LANES}"
    assert main([*words.split(), "--optimizer.schedule", "3:1000", "--optimizer.warmup", "0"]) == 0
    run, scores, drawn = tmp_path / "char-rum", {}, {}
    capsys.readouterr()
    for which in ("best", "last"):
        assert main(["sample", str(run), "--checkpoint", which, "--temperature", "0", "--length", "80"]) == 0
        drawn[which] = capsys.readouterr().out
        assert main(["eval", str(run), "--checkpoint", which, "--json", "--device", "cpu"]) == 0
        scores[which] = json.loads(capsys.readouterr().out)["bpc"]
    assert scores["best"] < scores["last"] and drawn["best"] != drawn["last"]
    assert [look.step for look in read_looks(run)] == [3, 6]
    assert main(["record", str(run), "--results", str(tmp_path / "results"), "--commit", "abc1234"]) == 0
    (entry,) = read_ledger(tmp_path / "results")
    assert (entry.test["step"], entry.test["bpc"]) == (3, pytest.approx(scores["best"], rel=1e-5))


def test_text_is_drawn_and_repeats_with_its_seed(run, capsys):
    command = ["sample", str(run), "--prompt", "the cook", "--length", "50", "--temperature", "0.8"]
    drawn = []
    for seed in ("0", "0", "1"):
        assert main([*command, "--seed", seed]) == 0
        drawn.append(capsys.readouterr().out)
    assert drawn[0].startswith("the cook") and len(drawn[0].removesuffix("\n")) == 58
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_trained_model_loads_in_two_lines(run):
    model = load_model(run)
    text = read_config(run).task.draw(model, length=20, prompt="the ", temperature=0)
    assert isinstance(model, CharModel) and len(text) == 20


def test_a_run_shows_what_it_writes(run, capsys, tmp_path):
    words = f"train char-rum --data {run.parent / 'book.txt'} --out {tmp_path} {SMALL} {LANES} --task.shown 40"
    assert main(words.split()) == 0
    shown = capsys.readouterr().err
    assert len(shown) > 2 * 40 and "best so far" in shown


def test_bytes_that_training_lacks_are_counted(run, capsys, tmp_path):
    (tmp_path / "signs.txt").write_bytes(small_text(4000) + b"@@")
    assert main(f"train char-rum --data {tmp_path / 'signs.txt'} --out {tmp_path} {SMALL} {LANES} --quiet".split()) == 0
    assert "signs.txt: 2 bytes of its validation and test parts never occur in training" in capsys.readouterr().err


def test_the_ledger_learns_nothing_of_the_machine(run):
    recorded = " ".join(changes(read_config(run)))
    assert "task.sha256=" in recorded and "task.corpus=book.txt" in recorded
    assert str(run.parent) not in recorded and "task.path" not in recorded


def test_a_moved_text_is_named_again(run, capsys, tmp_path):
    text = (run.parent / "book.txt").read_bytes()
    (run.parent / "book.txt").rename(tmp_path / "moved.txt")
    try:
        assert main(["eval", str(run), "--device", "cpu"]) == 1
        assert "book.txt, no longer exists; if it was moved, pass its new path: --data PATH" in capsys.readouterr().err
        assert main(["eval", str(run), "--device", "cpu", "--data", str(tmp_path / "moved.txt")]) == 0
        resumed = ["train", "--resume", str(run), "--steps", "8", "--quiet", "--data", str(tmp_path / "moved.txt")]
        assert main(resumed) == 0
        (tmp_path / "moved.txt").write_bytes(small_text(4000, seed=1))
        capsys.readouterr()
        assert main(["eval", str(run), "--device", "cpu", "--data", str(tmp_path / "moved.txt")]) == 2
        assert "the run: task.corpus 'book.txt' -> 'moved.txt' and 5 more. Score" in capsys.readouterr().err
        assert main([*resumed, "--steps", "9"]) == 2
        assert "a resumed run cannot change task.corpus" in capsys.readouterr().err
    finally:
        (run.parent / "book.txt").write_bytes(text)


@pytest.mark.parametrize(
    "words, code, message",
    [
        ("train char-rum --data nothing.txt", 1, "nothing.txt does not exist; --data takes a text file or a folder"),
        ("train char-rum --data empty.txt", 1, "empty.txt is empty; it must hold text"),
        ("train char-rum --data short.txt", 2, "32 lanes of one segment of 100 need 3201; take a longer text"),
        ("train char-rum --data noise.bin", 1, "noise.bin is not text"),
        ("train char-rum --data /dev/zero", 1, "/dev/zero is not a regular file"),
        ("train copying-rum --data short.txt", 2, "copying-rum-t200 cannot read your own text"),
        ("train char-rum --batch_size 8", 2, "batch_size is 8, but the text is read in 32 lanes"),
        (
            "train char-rum --task.corpus enwik8",
            2,
            "corpus='enwik8' belongs to a text of your own; take corpus ptb or ptb.char",
        ),
        ("train char-rum --model.tied true", 2, "tied=True needs an embedding as wide as the layer"),
    ],
)
def test_wrong_calls_are_one_clear_line(tmp_path, monkeypatch, capsys, words, code, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "short.txt").write_bytes(small_text(500))
    (tmp_path / "noise.bin").write_bytes(bytes(range(256)) * 30)
    assert main([*words.split(), "--quiet"]) == code
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.glob("runs/*/config.json"))


@pytest.mark.parametrize(
    "words, message",
    [
        ("--prompt Überall", "the prompt has 'Ü', which the text of the run (book.txt) does not have; allowed are"),
        ("--temperature -1", "temperature=-1.0; it must be at least 0, and finite"),
        ("--length -5", "--length is -5, but it must be at least 1"),
        ("--length 0", "--length is 0, but it must be at least 1"),
        ("--temperature nan", "temperature=nan"),
        ("--seed 99999999999999999999", "seed=99999999999999999999; it must be at least 0 and below 2**63"),
    ],
)
def test_wrong_samples_are_refused_before_anything_is_printed(run, capsys, words, message):
    assert main(["sample", str(run), *words.split()]) == 2
    caught = capsys.readouterr()
    assert message in caught.err and caught.out == ""


def test_only_language_models_write(tmp_path, capsys):
    words = f"train copying-rum --steps 1 --task.delay 2 --task.validation_size 2 --out {tmp_path} --device cpu --quiet"
    assert main(words.split()) == 0
    assert main(["sample", str(tmp_path / "copying-rum-t2")]) == 2
    assert "was trained on Copying, not on text" in capsys.readouterr().err


def test_a_terminal_gets_no_control_characters(run, capsys, monkeypatch):
    monkeypatch.setattr(CharLM, "stream", lambda *_, **options: iter(["a\x1b[31m", "b\n"]))
    assert main(["sample", str(run)]) == 0
    assert capsys.readouterr().out == "a\x1b[31mb\n\n"  # a pipe gets the text as it is
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["sample", str(run)]) == 0
    assert capsys.readouterr().out == "a\\x1b[31mb\n\n"
