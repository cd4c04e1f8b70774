"""bAbI as a task: layouts, buckets, epochs, scores, and steps that a CUDA graph can hold."""

import pytest
import torch

from stories import REAL, needs_babi, task1, use_made_up_task1
from torchrum.lab.data.babi import TASKS, parse
from torchrum.lab.tasks import Babi, Batch
from torchrum.lab.tasks.babi import WASTE, TrainingStories, choose_widths, count_steps, encode, lay_out, scored_batches

STORIES = parse(task1(40, seed=3))
WORDS = sorted({w for s in STORIES for t in (*s.statements, *(q.words for q in s.questions)) for w in t})
CPU = torch.device("cpu")


def rows(sentence_size=None):
    return encode([(1, STORIES)], ["", *WORDS], sentence_size)


def told(x: torch.Tensor) -> list[str]:
    return [WORDS[number - 1] if number else "" for number in x.flatten().tolist()]


QUESTIONS = [
    (word_list, list(question.words), question.answer)
    for story in STORIES
    for question in story.questions
    for word_list in [[word for statement in story.statements[: question.after] for word in statement]]
]


@pytest.mark.parametrize("place", ["last", "first", "twice"])
def test_every_row_reads_as_the_file_does(place):
    table = rows()
    lengths = count_steps(table, place)
    chosen = torch.tensor([0, 4, 7, 199])
    batch = lay_out(table, place, chosen, int(lengths[chosen].max()) + 3)
    for x, y, length, number in zip(batch.x, batch.y, batch.lengths, chosen, strict=True):
        story, question, answer = QUESTIONS[number]
        read = {"last": story + question, "first": question + story, "twice": question + story + question}[place]
        assert told(x[: len(read)]) == read
        assert length == lengths[number] == len(read)
        assert not x[len(read) :].any()
        assert WORDS[y - 1] == answer


def test_sentences_are_rows_of_words():
    table = rows(sentence_size=8)
    batch = lay_out(table, "last", torch.tensor([1]), 6)
    story = STORIES[0]
    sentences = [*story.statements[:4], story.questions[1].words]
    assert batch.x.shape == (1, 6, 8) and batch.lengths.tolist() == [5]
    for number, sentence in enumerate(sentences):
        assert told(batch.x[0, number]) == [*sentence, *[""] * (8 - len(sentence))]
    assert not batch.x[0, 5].any()


@pytest.mark.parametrize("batch_size, most", [(8, 10), (8, 2), (32, 10)])
def test_buckets_waste_little(batch_size, most):
    lengths = torch.randint(10, 200, (3000,), generator=torch.Generator().manual_seed(1))
    widths = choose_widths(lengths, batch_size, most)
    assert widths == sorted(set(widths)) and len(widths) <= most and widths[-1] == lengths.max()

    def waste(widths):
        which = torch.bucketize(lengths, torch.tensor(widths))
        steps = sum(w * -(-int((which == i).sum()) // batch_size) * batch_size for i, w in enumerate(widths))
        return steps / lengths.sum() - 1

    assert waste(widths) <= WASTE or len(widths) == most
    assert waste(choose_widths(lengths, batch_size, len(widths) - 1)) > WASTE  # no fewer would do


def test_few_buckets_are_the_best_few():
    lengths = torch.tensor([2] * 8 + [3] * 8 + [10] * 8 + [11] * 8)
    assert choose_widths(lengths, 8, 2) == [3, 11]
    assert choose_widths(torch.full((5,), 7), 8, 10) == [7]


def epoch(data: TrainingStories, size: int, first: int) -> list[Batch]:
    batches = []
    for step in range(first, first + 1000):
        width = data.plan(size, step)
        if step == first:
            count = len(data.order)
        if step == first + count:
            break
        batch = data.batch(torch.tensor(step))
        assert batch.x.shape == (size, width) and batch.lengths.max() <= width
        batches.append(batch)
    return batches


def test_an_epoch_shows_every_question_once_and_fills_up_from_the_same_bucket():
    data = TrainingStories(rows(), "last", seed=5, most_buckets=4)
    batches = epoch(data, 16, 0)
    data.plan(16, 0)
    seen = torch.bincount(data.order.flatten(), minlength=len(data.rows.answer))
    assert seen.min() == 1 and len(batches) == len(data.order)
    for width, members in data.buckets:
        extra = int(seen[members].sum()) - len(members)
        assert extra == -len(members) % 16 == int((seen[members] == 2).sum())  # no question more than twice
        assert len(members) > 0 and int(count_steps(data.rows, data.place)[members].max()) == width


def test_epochs_differ_and_follow_from_seed_and_step():
    def walk(seed, steps, size=16):
        data = TrainingStories(rows(), "last", seed=seed, most_buckets=4)
        return [(data.plan(size, step), data.batch(torch.tensor(step)).x) for step in steps]

    def same(one, two):
        return all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(one, two, strict=True))

    whole = walk(1, range(40))
    assert same(walk(1, range(20, 40)), whole[20:])  # resumed in the middle of an epoch
    assert not same(walk(2, range(10)), whole[:10])
    data = TrainingStories(rows(), "last", seed=1, most_buckets=4)
    data.plan(16, 0)
    steps = len(data.order)
    assert not same(walk(1, range(steps, 2 * steps)), walk(1, range(steps)))


def test_the_buffer_of_an_epoch_keeps_its_place():
    data = TrainingStories(rows(), "last", seed=1, most_buckets=4)
    data.plan(16, 0)
    place = data.order.data_ptr()
    data.plan(16, len(data.order) * 3)
    assert data.order.data_ptr() == place


@pytest.mark.parametrize("fields", [{}, {"question": "twice"}, {"reading": "sentences"}])
def test_nothing_is_read_on_the_host_and_shapes_follow_from_the_plan(fields, tmp_path, monkeypatch):
    use_made_up_task1(monkeypatch, tmp_path)
    task = Babi(task=1, **fields)
    data = task.setup(CPU, seed=0)
    shapes = {}
    for step in range(30):
        width = task.plan(8, step, data)
        real = task.train_batch(8, torch.Generator(), torch.tensor(step), data)
        assert shapes.setdefault(width, real.x.shape) == real.x.shape
    rows, order = data.rows, data.order
    data.rows, data.order = rows.to(torch.device("meta")), order.to("meta")  # a value read on the host is an error here
    batch = task.train_batch(8, torch.Generator(), torch.zeros((), dtype=torch.long, device="meta"), data)
    assert batch.x.shape == shapes[width]
    logits = torch.zeros(8, task.num_classes, device="meta")
    assert all(value.shape == () for value in (task.loss(logits, batch), *task.metrics(logits, batch).values()))


def test_scored_batches_hold_every_question_once():
    table = rows()
    batches = scored_batches(table, "last")
    assert sorted(batches[0].y.tolist()) == sorted(table.answer.tolist())
    assert sum(int(batch.lengths.sum()) for batch in batches) == int(count_steps(table, "last").sum())


def test_splits_are_apart(tmp_path, monkeypatch):
    use_made_up_task1(monkeypatch, tmp_path)
    task = Babi(task=1)
    assert len(task.rows("train").answer) == 270 and len(task.rows("validation").answer) == 30
    assert sum(len(batch.y) for batch in task.test(0)) == 100
    assert task.words()[0] == "" and len(task.words()) == task.input_size == 22
    assert task.steps_per_epoch(32) == 282
    assert task.provenance() == "task 1's training text is made up"


def test_a_joint_run_is_scored_by_task():
    task = Babi()
    group = torch.arange(1, 21).repeat(3)[:50]
    y = torch.arange(50) % 5
    guess = torch.where((group == 7) | (torch.arange(50) < 20), y, y + 1)
    logits = torch.nn.functional.one_hot(guess, task.num_classes).float()
    batches = [Batch(y[a:b], y[a:b], None, group[a:b]) for a, b in ((0, 30), (30, 50))]
    totals: dict[str, float] = {}
    for batch, part in zip(batches, (logits[:30], logits[30:]), strict=True):
        for name, value in {**task.metrics(part, batch), **task.details(part, batch)}.items():
            totals[name] = totals.get(name, 0.0) + float(value) * task.weight(batch) / 50
    scores = task.summarise({"loss": 1.0, **totals})
    right = guess == y
    expected = [float(right[group == number].float().mean()) for number in TASKS]
    assert [scores[f"task{number:02d}"] for number in TASKS] == pytest.approx(expected)
    assert scores["accuracy"] == pytest.approx(sum(expected) / 20)
    assert scores["solved"] == sum(value >= 0.95 for value in expected) == 1
    assert set(scores) == {"loss", "accuracy", "solved", *(f"task{number:02d}" for number in TASKS)}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"task": 21}, "task=21; it must be a number from 1 to 20"),
        ({"task": True}, "task=True"),
        ({"task": 1.0}, "task=1.0; it must be a number from 1 to 20"),
        ({"extra": 3}, "extra=3; it must be a tuple of tasks"),
        ({"extra": [3]}, r"extra=\[3\]; it must be a tuple of tasks"),
        ({"augment16": "no"}, "augment16='no'; it must be True or False"),
        ({"variant": "hn"}, "variant='hn'; it must be one of en-10k, en"),
        ({"question": "middle"}, "question='middle'"),
        ({"reading": "letters"}, "reading='letters'"),
        ({"task": 3, "augment16": True}, "augment16 changes task 16, but task is 3"),
        ({"task": 3, "extra": (3,)}, "must be tasks from 1 to 20, of a joint run"),
        ({"extra": (21,)}, "extra=.* must be tasks from 1 to 20"),
    ],
)
def test_impossible_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Babi(**fields)


def test_some_tasks_are_shown_more_often(tmp_path, monkeypatch):
    use_made_up_task1(monkeypatch, tmp_path)
    monkeypatch.setattr("torchrum.lab.data.babi.TASKS", (1,))  # a joint run of the one task that is there
    task = Babi(extra=(1, 1))
    plain = Babi()
    assert len(task.rows("train").answer) == 3 * len(plain.rows("train").answer)
    assert torch.equal(task.rows("validation").answer, plain.rows("validation").answer)
    assert torch.equal(task.rows("test").answer, plain.rows("test").answer)
    assert (plain.steps_per_epoch(32), task.steps_per_epoch(32)) == (282, 844)


@needs_babi
def test_the_real_task_16_and_its_augmentation(monkeypatch):
    monkeypatch.setenv("TORCHRUM_DATA", str(REAL))
    plain, changed = Babi(task=16), Babi(task=16, augment16=True)
    assert torch.equal(plain.rows("validation").units, changed.rows("validation").units)
    train, first, second = plain.rows("train"), changed.rows("train", 1), changed.rows("train", 2)
    assert torch.equal(train.answer, first.answer)
    assert not torch.equal(train.units, first.units) and not torch.equal(first.units, second.units)
    assert len(Babi(task=16, variant="en").rows("train").answer) == 900
