import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torchrum.cli import main
from torchrum.lab.tables import markdown_tables
from torchrum.lab.training import ConfigError, RunError
from torchrum.paper.bench import suites
from torchrum.paper.bench.layers import Shape
from torchrum.paper.bench.measure import Times
from torchrum.paper.bench.records import Report, Row, Target, read_report, text_table
from torchrum.paper.bench.report import draw_report, panels_by_size, report_tables, short, typed, write_markdown
from torchrum.paper.bench.suites import gpu_cases, target_cases

GPU = Shape(N=1000, T=150, dtype="bfloat16", device="cuda")
PLACE = {
    "gpu": "H200",
    "torch": "2.11",
    "commit": "abcdef0123456789",
    "command": "torchrum bench",
    "cpu": "x",
    "threads": 1,
}


def row(implementation: str, ms: float | None, case: str = "eta-bf16-n1000", **more) -> Row:
    times = None if ms is None else Times(ms, ms * 0.9, ms * 1.1, 30)
    options = {"lam": 0, "eta": 1.0} if implementation.startswith("fused") else {}
    return Row(case, implementation, "forward_backward", GPU, options, times, **more)


def report() -> Report:
    rows = [
        row("fused", 3.0, peak_bytes=10**8, first_call_seconds=4.0, error=1e-3),
        row("fused graphed", 1.5),
        row("gru graphed", 6.0),
        row("lstm graphed", None, failed="OutOfMemoryError: 9"),
    ]
    return Report("gpu", PLACE, rows, [Target("eta-bf16-n1000: share of cuDNN GRU's time", 0.8, 0.25)])


@pytest.mark.parametrize(
    "recorded, shown",
    [
        ("python -m torchrum bench --suite cpu --json .../cpu3.json", "torchrum bench --suite cpu --json cpu.json"),
        ("torchrum bench --commit abc --cases 'lam1-*'", "torchrum bench --cases 'lam1-*'"),
        ("torchrum bench --cases 'lam1", "torchrum bench --cases 'lam1"),
    ],
)
def test_the_command_is_what_a_user_types(recorded, shown):
    made = Report("cpu", {**PLACE, "command": recorded}, report().rows, path=Path("results/bench/cpu.json"))
    assert typed(made) == shown
    assert f"Command: `{shown}`" in markdown_tables(report_tables(made))


def test_json_round_trip(tmp_path):
    made = report()
    made.path = tmp_path / "bench" / "gpu.json"
    made.write()
    back = read_report(made.path)
    assert back.rows == made.rows
    assert back.targets == made.targets
    content = json.loads(made.path.read_text())
    assert content["rows"][1]["us_per_step"] == pytest.approx(10.0)
    assert content["targets"][0]["reached"]
    assert [entry.name for entry in made.path.parent.iterdir()] == ["gpu.json"]


def test_every_case_is_on_disk_at_once(tmp_path):
    made = Report("gpu", PLACE, path=tmp_path / "gpu.json")
    made.add(row("gru graphed", 6.0))
    assert len(read_report(made.path).rows) == 1


def test_text_table_has_ratios_failures_and_targets():
    text = text_table(report())
    line = next(line for line in text.splitlines() if "fused graphed" in line)
    assert "  0.25" in line
    assert "10.00" in line
    assert "OutOfMemoryError: 9" in text
    assert "[reached] eta-bf16-n1000: share of cuDNN GRU's time: 0.25, at most 0.8" in text


def test_markdown_goes_between_its_markers(tmp_path):
    readme = tmp_path / "README.md"
    other = "<!-- torchrum:bench cpu -->\nkept\n<!-- /torchrum:bench -->\n"
    readme.write_text(f"a\n{other}<!-- torchrum:bench gpu -->\nold\n<!-- /torchrum:bench -->\nb\n")
    assert write_markdown(readme, report())
    text = readme.read_text()
    assert text.startswith(f"a\n{other}")
    assert text.endswith("<!-- /torchrum:bench -->\nb\n")
    assert "old" not in text
    assert markdown_tables(report_tables(report())) in text
    # plain calls and CUDA graphs apart, for RUM as for nn.GRU; the ratio is that of the fastest of each
    assert "| case | RUM / GRU | RUM, fused | RUM, fused, CUDA graph | nn.GRU, CUDA graph |" in text
    assert "| lam=0, eta=1, N=1000, T=150, bfloat16 | 0.25 | 20 | 10 | 40 |" in text
    target = "share of cuDNN GRU's time: lam=0, eta=1, N=1000, T=150, bfloat16"
    assert f"| {target} | 0.25 | at most 0.8 | yes |" in text
    assert not write_markdown(readme, report())


def test_markdown_without_markers(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("nothing\n")
    with pytest.raises(RunError, match="no markers to write between; put <!-- torchrum:bench gpu -->"):
        write_markdown(readme, report())


def test_numbers_are_short():
    assert [short(value) for value in (0.12345, 8.4567, 99.96, 3157.6)] == ["0.123", "8.46", "100", "3,158"]


def test_plot(tmp_path):
    sweep = report()
    small = Shape(N=256, T=150, dtype="bfloat16", device="cuda")
    for old in report().rows[:3]:
        sweep.rows.append(Row("eta-bf16-n256", old.implementation, old.mode, small, old.options, old.times))
    assert list(panels_by_size(sweep.rows)) == ["RUM λ=0, η=1, bfloat16"]
    assert draw_report(sweep, tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="no case of the GPU suite at two sizes"):
        draw_report(report(), tmp_path / "none.png")


def full_suite() -> Report:
    """Every case of the suite, with made-up times: what the README and the plot must cope with."""
    made = Report("gpu", {**PLACE, "gpu": "made up"})
    for case in gpu_cases():
        for mode in case.modes:
            for name in case.implementations:
                options = dict(case.options) if name.startswith(("fused", "authors", "torch")) else {}
                ms = (2.0 if "graphed" in name else 3.0) * (0.5 if name.startswith("fused") else 1.0)
                new = Row(case.name, name, mode, case.shape, options, Times(ms, ms, ms, 30), precision=case.precision)
                made.rows.append(new)
    return made


def test_full_gpu_report_to_readme_and_plot(tmp_path, capsys):
    made, readme, figure = full_suite(), tmp_path / "README.md", tmp_path / "figures" / "bench_gpu.png"
    made.path = tmp_path / "gpu.json"
    made.write()
    readme.write_text("<!-- torchrum:bench gpu -->\n<!-- /torchrum:bench -->\n")
    assert main(["bench", "--report", str(made.path), "--write", str(readme), "--plot", str(figure)]) == 0
    text = readme.read_text()
    assert "| lam=1, N=100, T=1020, float32 (FP32 matmul) |" in text
    assert "whole training step) |  | 1.5 ms | 1 ms |" in text
    assert text.count("\n| ") == 2 + len(target_cases()) + 3  # the head, its rule, the targets, the originals
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert len(panels_by_size(made.rows)) == 6


def test_cpu_suite_quick(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(suites, "peak_memory", lambda name, shape, options: 1000 * len(name))
    path = tmp_path / "cpu.json"
    assert main(["bench", "--quick", "--samples", "2", "--json", str(path), "--cases", "lam0-*"]) == 0
    back = read_report(path)
    assert {row.implementation for row in back.rows} == set(suites.IMPLEMENTATIONS)
    assert {row.case for row in back.rows} == {"lam0-quick"}
    assert all(row.times.median > 0 and row.times.cpu is not None and row.times.samples == 2 for row in back.rows)
    assert back.find("lam0-quick", "gru").peak_bytes == 3000
    shown = capsys.readouterr().out
    assert "vs original" in shown and "authors" not in shown
    assert main(["bench", "--report", str(path)]) == 0
    assert "lam0-quick" in capsys.readouterr().out


def test_cpu_cases_run_with_their_number_of_threads(monkeypatch):
    seen = []
    monkeypatch.setattr(suites, "_rows", lambda *args: [seen.append(torch.get_num_threads()), []][1])
    suite = [replace(suites.QUICK[0], threads=1), suites.QUICK[0]]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    suites.run_cpu(Report("cpu", {}), suite, log=lambda text: None)
    torch.set_num_threads(before)
    assert seen == [1, 2]
    made = Report("cpu", PLACE, [Row("lam0", "gru", "forward_backward", GPU, {}, Times(1, 1, 1, 1), threads=1)])
    assert "1 thread" in markdown_tables(report_tables(made))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--samples", "0"], "--samples is 0"),
        (["--plot", "a.png"], "need --report"),
        (["--suite", "gpu", "--memory"], "--memory needs --suite cpu"),
        (["--cases", "nothing*"], "no case of the cpu suite matches"),
        (["--seconds", "9"], "--seconds needs --suite gpu, but the suite is cpu"),
        (["--seconds", "nan"], "--seconds is nan; it must be 0 or more"),
        (["--json", "/"], "--json / is a folder; name a file"),
        (["--report", "a.json", "--json", "b.json"], "--report measures nothing, so --json has no effect"),
        (["--report", "a.json", "--suite", "gpu"], "--report measures nothing, so --suite has no effect"),
        (
            ["--report", "a.json", "--quick"],
            "--report measures nothing, so --quick has no effect; leave one of them out",
        ),
    ],
)
def test_wrong_calls(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "content, message",
    [
        ("null", "it is None, but it must be an object"),
        ("[", "cannot be read: Expecting value"),
        ('{"rows": 3}', "rows is 3, but it must be a list"),
        ('{"rows": [{"case": "x"}]}', r"the field rows\[0\].implementation is missing"),
    ],
)
def test_a_damaged_report_is_one_line(tmp_path, capsys, content, message):
    (tmp_path / "a.json").write_text(content)
    assert main(["bench", "--report", str(tmp_path / "a.json")]) == 1
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.count("\n") == 1
