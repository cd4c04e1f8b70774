"""Markdown tables: their lines, and cells with scores over seeds."""

from collections.abc import Collection, Iterable, Sequence


def table_lines(header: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """The lines of a Markdown table; columns whose numbers are in ``right`` are aligned to the right."""
    rule = ["---:" if column in right else "---" for column in range(len(header))]
    return ["| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)]


def with_best(values: Sequence[float], bests: Sequence[float], name: str) -> str:
    """The spread of a score over seeds and, where it is another, the mean of their best."""
    mean = spread([sum(bests) / len(bests)], name)
    return spread(values, name) + ("" if mean == spread([sum(values) / len(values)], name) else f", best {mean}")


def spread(values: Sequence[float], name: str) -> str:
    """The mean of a score over seeds and, where they differ, its range."""
    if not values:
        return ""
    form = "{:.2%}" if name == "accuracy" else "{:.4f}"
    mean, ends = form.format(sum(values) / len(values)), span(values, form)
    return mean if mean == ends else f"{mean} ({ends})"


def span(values: Sequence[float], form: str) -> str:
    """The least and the greatest, or the one that they are."""
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"
