"""The one type of table, in its three formats."""

from torchrum.lab.tables import Link, Table

TABLE = Table(
    ("model", "**score**"),
    [(Link("a [b]", "docs/a.md#x"), "1 < 2"), ("`rum | --lam 1`", "10 & **best**")],
    title="**Title** of it",
    caption="Below it.",
    notes=["one", "`two`\nlines"],
    right=(1,),
)


def test_markdown_escapes_what_is_not_code():
    assert TABLE.markdown().splitlines() == [
        "**Title** of it",
        "",
        "| model | **score** |",
        "| --- | ---: |",
        r"| [a \[b\]](docs/a.md#x) | 1 &lt; 2 |",
        r"| `rum \| --lam 1` | 10 &amp; **best** |",
        "",
        "Below it.",
        "",
        "- one",
        "- `two` lines",
    ]
    assert Table(("a",), [("b",)]).markdown() == "| a |\n| --- |\n| b |\n"


def test_html_escapes_everything():
    assert TABLE.html().splitlines() == [
        "<table>",
        "<thead><tr><th>model</th><th><strong>score</strong></th></tr></thead>",
        "<tbody>",
        '<tr><td><a href="docs/a.md#x">a [b]</a></td><td>1 &lt; 2</td></tr>',
        '<tr><td><code>rum | <span class="flag">--lam</span> 1</code></td><td>10 &amp; <strong>best</strong></td></tr>',
        "</tbody>",
        "</table>",
    ]
    assert '<code class="long">' in Table(("x",), [("`" + 41 * "y" + "`",)]).html()


def test_plain_text_is_aligned_and_has_no_marks():
    assert TABLE.text().splitlines() == [
        "model              score",
        "a [b]              1 < 2",
        "rum | --lam 1  10 & best",
    ]
