"""The examples for other people's packages run and reach what they are written for; absent packages are skipped."""

import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchrum.lab.trained import ALICE, RECALL
from torchrum.lab.training import load_model, read_config

FOLDER = Path(__file__).parents[1] / "examples"
PACKAGES = {
    "accelerate_loop": ("accelerate",),
    "captum_attribution": ("captum", "torchinfo"),
    "darts_forecast": ("darts",),
    "lightning_forecast": ("pytorch_lightning", "onnxruntime", "onnxscript"),
    "opacus_private": ("opacus",),
    "ray_search": ("ray",),
    "serve_http": ("starlette", "httpx2"),
    "skorch_search": ("skorch", "sklearn"),
    "torchrl_cue": ("torchrl",),
    "transformers_trainer": ("transformers", "accelerate"),
}


def load(name: str):
    """The example as a module; skips where a package is absent."""
    for package in PACKAGES[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the example needs the package {package}, which is not installed")
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_run():
    assert sorted(PACKAGES) == sorted(path.stem for path in FOLDER.glob("*.py"))


def test_accelerate():
    first, last = load("accelerate_loop").main()
    assert last < 0.75 * first


def test_captum_and_torchinfo():
    decisive, completeness, parameters = load("captum_attribution").main()
    assert decisive == 0
    assert completeness < 1e-4
    assert parameters == 3 * 16 * 1 + 2 * 16 * 16 + 3 * 16 + 16 + 1


def test_darts():
    assert load("darts_forecast").main() < 0.2  # the mean of |sin| is 0.64


@pytest.mark.slow
def test_lightning():
    loss, difference = load("lightning_forecast").main()
    assert loss < 0.25  # the variance is 0.5
    assert difference < 1e-5


def test_opacus_takes_exact_per_sample_gradients():
    example = load("opacus_private")
    model, x, y = example.Classifier().double(), torch.randn(5, 9, 4).double(), torch.tensor([0, 1, 1, 0, 1])
    each = example.per_sample_gradients(model, x, y)
    for place in range(5):
        loss = torch.nn.functional.cross_entropy(model(x[place : place + 1]), y[place : place + 1])
        expected = dict(zip(each, torch.autograd.grad(loss, list(model.parameters())), strict=True))
        torch.testing.assert_close({name: part[place] for name, part in each.items()}, expected)
    accuracy, epsilon = example.main()
    assert accuracy > 0.65
    assert 0 < epsilon < 20


@pytest.mark.slow
def test_ray(tmp_path):
    accuracy, setting = load("ray_search").main(steps=20, trials=2, folder=tmp_path)
    assert accuracy > 0
    assert set(setting) == {"optimizer.lr", "model.hidden_size", "steps"}
    assert len(list(tmp_path.rglob("run/metrics.jsonl"))) == 2


def test_only_a_model_of_text_is_served():
    with pytest.raises(SystemExit, match="trained on Recall, not on text"):
        load("serve_http").serve(RECALL)


@pytest.fixture
def server():
    """The example's module, a clock that the test sets, and a function that makes a client with given limits."""
    example = load("serve_http")
    from starlette.testclient import TestClient

    clock = SimpleNamespace(now=0.0)

    def client(**limits):
        return TestClient(example.serve(limits=example.Limits(**limits), clock=lambda: clock.now))

    return SimpleNamespace(example=example, clock=clock, client=client)


def begin(client) -> str:
    answer = client.post("/sessions")
    assert answer.status_code == 201
    return f"/sessions/{answer.json()['session']}"


def test_each_session_goes_on_with_its_own_text(server):
    client, task, model = server.client(), read_config(ALICE).task, load_model(ALICE)
    prompts = ["Alice was ", "The Queen"]
    sessions, texts = [begin(client) for _ in prompts], ["", ""]
    for part in range(3):
        for index, (session, prompt) in enumerate(zip(sessions, prompts, strict=True)):
            body = {"text": "" if part else prompt, "length": 12, "temperature": 0}
            texts[index] += client.post(session, json=body).json()["text"]
    assert texts == [task.draw(model, length=36, prompt=prompt, temperature=0) for prompt in prompts]


@pytest.mark.parametrize(
    "body, status, message",
    [
        (b"x" * 200, 413, "more than 100 bytes"),
        (b"[", 400, "not JSON"),
        (b"[" * 100_000, 413, "more than"),
        (b"\xff", 400, "not JSON"),
        (b"[]", 400, "must be a JSON object"),
        (b'{"txet": "a"}', 400, "some of text, length, temperature"),
        (b'{"text": "aaaaaaaaaaaaaaaaaaaaa"}', 400, "at most 20 characters"),
        (b'{"text": "\\ud800"}', 400, "surrogates"),
        (b'{"text": "~"}', 400, "the prompt has '~'"),
        (b'{"length": 11}', 400, "from 0 to 10"),
        (b'{"length": true}', 400, "from 0 to 10"),
        (b'{"temperature": NaN}', 400, "from 0 to 10"),
    ],
)
def test_requests_beyond_the_limits_are_refused(server, body, status, message):
    client = server.client(body=100, text=20, length=10)
    answer = client.post(begin(client), content=body)
    assert (answer.status_code, message in answer.json()["error"]) == (status, True), answer.text


def test_a_deeply_nested_body_is_refused(server):
    client = server.client(body=1_000_000)
    assert client.post(begin(client), content=b"[" * 500_000).status_code == 400


def test_a_session_has_a_rate(server):
    client = server.client(text=10, length=10, rate=5.0)
    session, body = begin(client), {"text": "Alice was ", "length": 10}
    assert client.post(session, json=body).status_code == 200
    refused = client.post(session, json=body)
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "4")
    server.clock.now = 4.0
    assert client.post(session, json=body).status_code == 200


def test_sessions_are_few_and_end(server):
    client = server.client(sessions=2, idle=10.0, age=25.0)
    used, idle = begin(client), begin(client)
    assert client.post("/sessions").status_code == 503
    for server.clock.now in (9.0, 18.0):
        assert client.post(used, json={"text": "a"}).status_code == 200
    assert client.post(idle, json={"text": "a"}).status_code == 404
    begin(client)  # in the idle one's place
    server.clock.now = 25.5
    assert client.post(used, json={"text": "a"}).status_code == 404
    third = begin(client)
    assert client.delete(third).status_code == 204
    assert client.delete(third).status_code == 404


def test_a_session_answers_one_request_at_a_time(server, monkeypatch):
    client, began, go_on = server.client(), threading.Event(), threading.Event()
    session = begin(client)

    def reply(self, text, length, temperature):
        began.set()
        assert go_on.wait(10)
        return "done"

    monkeypatch.setattr(server.example.Session, "reply", reply)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.post, session, json={})
        assert began.wait(10)
        assert client.post(session, json={}).status_code == 409
        go_on.set()
        assert first.result().json() == {"text": "done"}


@pytest.mark.slow
def test_skorch():
    accuracy, best = load("skorch_search").main()
    assert accuracy > 0.6
    assert best["max_epochs"] == 2


def test_torchrl():
    assert load("torchrl_cue").main(updates=40) > 0.9


def test_transformers_trainer():
    before, after = load("transformers_trainer").main()
    assert after < 0.3 * before
