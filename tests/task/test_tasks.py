"""What is trained: TinyGPT's sizes and causality, the language task's numbers by hand, images, the user's own parts."""

import itertools
import math
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heloco.corpus import Corpus, prepare, split
from heloco.errors import UserError
from heloco.task import mean_scores, to_device
from heloco.task.datasets import DatasetTask
from heloco.task.gpt import PRESETS, GPTConfig, TinyGPT, build, preset
from heloco.task.images import CLASSES, STYLES, ImagesTask
from heloco.task.language import LanguageTask

TINY = GPTConfig(width=16, layers=2, heads=2, context=12, vocab_size=257)


pytestmark = pytest.mark.usefixtures("one_thread")


def same(ours: nn.Module, theirs: nn.Module) -> bool:
    a, b = ours.state_dict(), theirs.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- TinyGPT


def size(config: GPTConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in TinyGPT(config).parameters())


def test_the_papers_model_and_gpt2_small_have_exactly_their_parameters():
    assert size(preset("paper")) == 14_468_608
    assert size(preset("124m")) == 124_439_808


def test_presets_go_from_one_million_up_to_1300_million():
    sizes = [size(config) for config in PRESETS.values()]
    assert list(PRESETS) == ["1m", "5m", "paper", "30m", "60m", "124m", "1.3b"]
    assert all(a < b for a, b in itertools.pairwise(sizes))
    assert [round(n / 1e6) for n in sizes] == [1, 5, 14, 30, 58, 124, 1316]


def test_a_presets_sizes_can_be_changed_and_a_wrong_name_is_answered():
    assert preset("paper", layers=2, vocab_size=300) == GPTConfig(width=128, layers=2, heads=4, context=128, vocab_size=300)
    with pytest.raises(UserError, match=r"There is no model preset 'papier'; did you mean 'paper'\?"):
        preset("papier")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"width": 0}, "The model's width is 0: give a number ≥ 1."),
        ({"heads": 3}, "The model's width 16 is not a multiple of its 3 heads: change one of them."),
    ],
)
def test_impossible_sizes_are_answered_with_a_sentence(change, sentence):
    with pytest.raises(UserError) as error:
        GPTConfig(**{"width": 16, "layers": 2, "heads": 2, "context": 12, **change})
    assert str(error.value) == sentence


@pytest.mark.parametrize("tied", [False, True])
def test_later_tokens_do_not_change_earlier_logits(tied):
    model = build(GPTConfig(width=16, layers=2, heads=2, context=12, vocab_size=50, tied=tied), seed=0).double()
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(50, (2, 12), generator=draw)
    logits = model(tokens)
    assert logits.shape == (2, 12, 50)
    for changed in range(12):
        other = tokens.clone()
        other[:, changed] = (other[:, changed] + 1) % 50
        theirs = model(other)
        torch.testing.assert_close(theirs[:, :changed], logits[:, :changed], rtol=1e-12, atol=1e-12)
        assert not torch.allclose(theirs[:, changed], logits[:, changed])
        assert not torch.allclose(theirs[:, -1], logits[:, -1])  # and they are seen later on
    torch.testing.assert_close(model(tokens[:, :5]), logits[:, :5], rtol=1e-12, atol=1e-12)


def test_positions_matter():
    logits = build(TINY, seed=0)(torch.full((1, 12), 7))
    assert (logits[0, 0] - logits[0, 5]).abs().max() > 0.1


def test_words_and_positions_of_a_tied_model_begin_at_one_size():
    model = build(GPTConfig(width=64, layers=1, heads=2, context=64, vocab_size=500, tied=True), seed=0)
    words, positions = model.token.weight.std().item(), model.position.weight.std().item()
    assert 0.95 < words / positions < 1.05


def test_tied_weights_are_one_parameter():
    model = build(GPTConfig(width=16, layers=1, heads=2, context=12, vocab_size=50, tied=True), seed=0)
    assert model.head.weight is model.token.weight
    loss = F.cross_entropy(model(torch.arange(12)[None]).flatten(0, 1), torch.arange(12))
    assert loss.item() == pytest.approx(math.log(50), rel=0.1)  # it starts near the uniform guess


def test_the_initial_parameters_come_from_the_seed_alone():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first = build(TINY, seed=5)
        torch.manual_seed(2)
        repeat = build(TINY, seed=5)
    assert same(first, repeat)
    assert not same(first, build(TINY, seed=6))


@pytest.mark.parametrize("make", [lambda: build(TINY, seed=5), lambda: ImagesTask(seed=0, images=5, val_images=5).build_model()])
def test_building_a_model_leaves_the_global_generator_as_it_was(make):
    before = torch.get_rng_state()
    make()
    assert torch.equal(torch.get_rng_state(), before)


# ---- language

TEXT = {
    "de": ("Der Hund bellt. Die Katze schläft.\n\nÜber den Dächern.", "Ein Vogel singt ein schönes Lied.\n\nUnd dann ist Ruhe."),
    "en": ("The dog barks and the cat sleeps all day long.", "A bird is singing its song in the old tree."),
}


def tokens_of(text: str) -> list[int]:
    """Byte tokens by hand: each document and an end."""
    return [token for document in text.split("\n\n") for token in (*document.encode(), 256)]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    monkeypatch.setenv("HELOCO_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "text"
    folder.mkdir()
    for name, (train, val) in TEXT.items():
        (folder / f"{name}.train.txt").write_text(train, encoding="utf-8")
        (folder / f"{name}.val.txt").write_text(val, encoding="utf-8")
    return prepare(str(folder))


def language_task(corpus: Corpus, *, context: int = 8, eval_windows: int = 64, model: GPTConfig = TINY) -> LanguageTask:
    shards = split(corpus, scheme="source", context=context)
    return LanguageTask(corpus, shards, model, context=context, seed=3, eval_windows=eval_windows)


def nats_by_hand(model: nn.Module, tokens: list[int], context: int, windows: list[int]) -> float:
    total = 0.0
    with torch.no_grad():
        for w in windows:
            piece = tokens[w * context : (w + 1) * context + 1]
            log_p = model(torch.tensor([piece[:-1]]))[0].double().log_softmax(-1)
            total -= sum(float(log_p[i, target]) for i, target in enumerate(piece[1:]))
    return total / (len(windows) * context)


def test_nats_per_token_and_bits_per_byte_are_those_of_a_hand_computation(corpus):
    task = language_task(corpus)
    model = task.build_model()
    scores = task.evaluate(model)
    assert list(scores) == ["de", "en"]
    for name, (_, text) in TEXT.items():
        tokens = tokens_of(text)
        nats = nats_by_hand(model, tokens, 8, list(range((len(tokens) - 1) // 8)))
        text_bytes = len(text.replace("\n\n", "").encode())
        assert scores[name]["loss"] == pytest.approx(nats, rel=1e-5)
        assert scores[name]["bits_per_byte"] == pytest.approx(nats / math.log(2) * len(tokens) / text_bytes, rel=1e-5)
    assert mean_scores(scores)["loss"] == pytest.approx((scores["de"]["loss"] + scores["en"]["loss"]) / 2, rel=1e-12)


def test_fewer_evaluation_windows_are_spread_over_the_text(corpus):
    task = language_task(corpus, context=4, eval_windows=3)
    model = task.build_model()
    tokens = tokens_of(TEXT["de"][1])
    count = (len(tokens) - 1) // 4
    assert count == 13
    expected = nats_by_hand(model, tokens, 4, [0, 6, 12])
    assert task.evaluate(model)["de"]["loss"] == pytest.approx(expected, rel=1e-5)


def test_evaluation_leaves_the_model_as_it_was(corpus):
    task = language_task(corpus)
    for training in (True, False):
        model = task.build_model().train(training)
        before = torch.get_rng_state()
        task.evaluate(model)
        assert model.training == training
        assert same(model, task.build_model())
        assert torch.equal(torch.get_rng_state(), before)


def test_batches_are_windows_of_the_text_each_once_an_epoch(corpus):
    task = language_task(corpus)
    assert [(s.name, s.windows) for s in task.shards] == [("de", 6), ("en", 5)]
    tokens = tokens_of(TEXT["de"][0])
    windows = {tuple(tokens[8 * w : 8 * w + 9]) for w in range(6)}
    for epoch in range(2):
        batch = task.batch(0, np.arange(6 * epoch, 6 * epoch + 6))
        assert batch.shape == (6, 9)
        assert {tuple(row) for row in batch.tolist()} == windows
        assert task.units(batch) == 48
    assert torch.equal(task.batch(0, np.array([3])), task.batch(0, np.arange(6))[3:4])


def test_the_loss_is_the_mean_over_all_tokens(corpus):
    task = language_task(corpus)
    model = task.build_model()
    batch = task.batch(1, np.array([0, 3]))
    log_p = model(batch[:, :-1]).double().log_softmax(-1)
    by_hand = -log_p.gather(-1, batch[:, 1:, None]).mean()
    assert task.loss(model, batch).item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_the_model_of_a_task_comes_from_its_seed(corpus):
    assert same(language_task(corpus).build_model(), language_task(corpus).build_model())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"context": 13}, "A context of 13 tokens does not fit the model's 12: shorten --context."),
        (
            {"model": GPTConfig(width=16, layers=1, heads=2, context=12, vocab_size=256)},
            "The tokenizer bytes has 257 tokens and the model a vocabulary of 256: leave --vocab-size out, or give at least 257.",
        ),
        (
            {"context": 46, "model": GPTConfig(width=16, layers=1, heads=2, context=64, vocab_size=257)},
            "The validation text of 'en' has 44 tokens, too few for a context of 46: give more text or a shorter --context.",
        ),
    ],
)
def test_what_does_not_fit_is_answered_with_a_sentence(corpus, options, sentence):
    with pytest.raises(UserError) as error:
        language_task(corpus, **options)
    assert str(error.value) == sentence


# ---- images


def test_images_can_be_learnt_and_accuracy_rises():
    task = ImagesTask(seed=0, images=600, val_images=200)
    model = task.build_model()
    at_first = mean_scores(task.evaluate(model))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(100):
        positions = np.arange(16 * step, 16 * step + 16)
        batches = [task.batch(shard, positions) for shard in range(5)]
        adam.zero_grad()
        task.loss(model, (torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))).backward()
        adam.step()
    scores = task.evaluate(model)
    assert list(scores) == list(STYLES)
    assert at_first["accuracy"] < 0.3  # a sixth by chance
    assert mean_scores(scores)["accuracy"] > 0.8
    assert mean_scores(scores)["loss"] < 0.5 * at_first["loss"]


def test_images_are_the_seeds_and_no_validation_image_is_trained_on():
    first, repeat, other = (ImagesTask(seed=s, images=50, val_images=20) for s in (0, 0, 1))
    positions = np.arange(50)
    for shard in range(len(STYLES)):
        images, labels = first.batch(shard, positions)
        assert images.shape == (50, 1, 16, 16)
        assert labels.min() >= 0
        assert labels.max() < len(CLASSES)
        assert torch.equal(images, repeat.batch(shard, positions)[0])
        assert not torch.equal(images, other.batch(shard, positions)[0])
        trained = {image.numpy().tobytes() for image in images}
        assert len(trained) == 50
        assert not trained & {image.numpy().tobytes() for image in first.validation[shard][0]}
    assert first.digest == repeat.digest != other.digest
    assert first.units(first.batch(0, positions[:7])) == 7


# ---- the user's own parts


class Own(nn.Module):
    """Somebody's module: a line."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.slope * x


def squared(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def points(*xs: float) -> list[dict[str, float]]:
    return [{"x": x, "y": 3 * x} for x in xs]


def own_task(**options) -> DatasetTask:
    return DatasetTask(Own(), squared, {"low": points(1, 2, 3), "high": points(10, 20)}, **options)


def test_a_task_of_the_users_own_parts():
    task = own_task(validation={"far": points(1, 2, 3, 4, 5), "near": points(1)}, eval_batch_size=2)
    assert [(s.name, s.windows) for s in task.shards] == [("low", 3), ("high", 2)]
    assert task.unit == "samples"
    model = task.build_model()
    for epoch in range(3):
        batch = task.batch(0, np.arange(3 * epoch, 3 * epoch + 3))
        assert sorted(batch["x"].tolist()) == [1, 2, 3]
        assert torch.equal(batch["y"], 3 * batch["x"])
        assert task.units(batch) == 3
    assert task.loss(model, {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([3.0, 6.0])}).item() == 2.5
    # (1 + 4 + 9 + 16 + 25) / 5, though the batches are of 2, 2 and 1
    assert task.evaluate(model) == {"far": {"loss": 11.0}, "near": {"loss": 1.0}}


def test_every_model_it_builds_is_a_new_one():
    model = Own()
    task = DatasetTask(model, squared, {"low": points(1)})
    with torch.no_grad():
        model.slope.fill_(9.0)
        task.build_model().slope.fill_(9.0)
    assert task.build_model().slope.item() == 2.0


def test_the_users_own_evaluation_sees_the_model_in_evaluation_mode():
    modes = []

    def evaluate(model: nn.Module) -> dict[str, dict[str, float]]:
        modes.append(model.training)
        return {"all": {"loss": model.slope.item()}}

    task = own_task(evaluate=evaluate)
    model = task.build_model()
    assert task.evaluate(model) == {"all": {"loss": 2.0}}
    assert modes == [False]
    assert model.training
    assert own_task().evaluate(model) == {}


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("sample", "units"),
    [
        (torch.zeros(3), 2),
        ((torch.zeros(3), 1), 2),
        (Pair(torch.zeros(3), 1), 2),
        ({"text": "some words", "x": torch.zeros(3)}, 2),  # default_collate leaves a list of strings in front
        ("words", 0),
    ],
)
def test_samples_are_counted_and_moved_whatever_they_are_wrapped_in(sample, units):
    task = DatasetTask(Own(), squared, {"only": [sample] * 4})
    batch = task.batch(0, np.arange(2))
    assert task.units(batch) == units
    moved = to_device(batch, "cpu")
    assert type(moved) is type(batch)
    assert str(moved) == str(batch)


def test_an_empty_shard_is_answered_with_a_sentence():
    with pytest.raises(UserError) as error:
        DatasetTask(Own(), squared, {"low": points(1), "none": []})
    assert str(error.value) == "shards['none'] is empty: give it data or leave it out."


def test_another_set_of_data_has_another_digest():
    assert own_task().digest == own_task().digest != DatasetTask(Own(), squared, {"low": points(1, 2)}).digest
    assert own_task(digest="mine-2").digest == "mine-2"


def test_the_mean_over_what_was_evaluated_is_plain():
    assert mean_scores({"a": {"loss": 1.0, "accuracy": 0.5}, "b": {"loss": 4.0, "accuracy": 1.0}}) == {
        "loss": 2.5,
        "accuracy": 0.75,
    }
    assert mean_scores({}) == {}
