"""The models that come with the package: they load, score and sample, and the browser computes the same."""

import base64
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from torchrum.cli import main
from torchrum.lab.tasks import CharLM, Recall
from torchrum.lab.trained import ALICE, RECALL
from torchrum.lab.training import load_model, read_config

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "_static" / "recall.js"
RUN = """
const { RecallModel } = require(process.argv[1]);
const { weights, sequences } = JSON.parse(require("fs").readFileSync(0, "utf8"));
const model = new RecallModel(weights);
const states = sequences.map((x) => model.run(model.start(), x));
console.log(JSON.stringify(states.map((state) => ({ R: state.R, chances: model.answer(state) }))));
"""


@pytest.mark.parametrize("run", [ALICE, RECALL], ids=lambda run: run.name)
def test_they_are_small_and_name_no_place(run):
    files = [path for path in run.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 500_000
    task = json.loads((run / "config.json").read_text())["task"]
    assert not task.get("path")


def test_the_recall_model_recalls_any_number_of_pairs():
    task, model = read_config(RECALL).task, load_model(RECALL)
    assert isinstance(task, Recall) and task.pairs == 8
    for pairs in (1, 3, 5, 8):
        batch = task.batch(500, torch.Generator().manual_seed(3), shown=pairs)
        assert (model(batch.x).argmax(-1) == batch.y).float().mean() >= 0.99


def test_the_alice_model_predicts_its_text():
    task, model = read_config(ALICE).task, load_model(ALICE)
    assert isinstance(task, CharLM)
    text = "the White Rabbit was still in sight, and the Mock Turtle said to the Gryphon"
    ids = torch.tensor([task.ids(text)])
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(ids[:, :-1])[0][0], ids[0, 1:])
    assert loss < task.memoryless  # the best that knows one character before


def test_sample_needs_no_run(capsys):
    assert main(["sample", "--length", "80", "--prompt", "Alice "]) == 0
    caught = capsys.readouterr()
    assert caught.out.startswith("Alice ") and len(caught.out) >= 80
    assert "Wonderland" in caught.err and "torchrum train char-rum --data FILE" in caught.err


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, to run the browser's script")
def test_the_browser_computes_what_the_library_does():
    task, model = read_config(RECALL).task, load_model(RECALL).double()
    assert isinstance(task, Recall)
    (weights,) = RECALL.glob("checkpoints/step-*/model.safetensors")
    sequences = [task.batch(1, torch.Generator().manual_seed(n), shown=n).x[0] for n in (1, 4, 8)]
    told = {
        "weights": base64.b64encode(weights.read_bytes()).decode(),
        "sequences": [x.tolist() for x in sequences],
    }
    done = subprocess.run(
        ["node", "-e", RUN, str(SCRIPT)], input=json.dumps(told), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for x, found in zip(sequences, json.loads(done.stdout), strict=True):
        with torch.no_grad():
            symbols = torch.nn.functional.one_hot(x[None], task.input_size).double()
            _, (_, R) = model.layer(symbols)
            chances = model(x[None])[0].softmax(-1)
        torch.testing.assert_close(torch.tensor(found["R"], dtype=torch.float64), R[0, 0], rtol=0, atol=1e-9)
        torch.testing.assert_close(torch.tensor(found["chances"], dtype=torch.float64), chances, rtol=0, atol=1e-9)
