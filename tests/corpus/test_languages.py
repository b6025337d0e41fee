"""The built-in languages: unlike each other, like themselves, and the same every time."""

import re
import time
from collections import Counter
from itertools import combinations

import pytest

from heloco.corpus.languages import GRAMMARS, LANGUAGES, TRAIN_BYTES, documents
from heloco.corpus.parts import val_limit
from heloco.errors import UserError


def text(language, seed=0, split="train", size=60_000):
    return "\n\n".join(documents(language, seed, split, size))


def letters(passage):
    return {c for c in passage if c.isalpha()}


def test_no_letter_is_shared_by_two_languages():
    alphabets = {language: letters(text(language)) for language in LANGUAGES}
    assert len(LANGUAGES) == 5
    for a, b in combinations(LANGUAGES, 2):
        assert not alphabets[a] & alphabets[b]
    for language in LANGUAGES:
        assert alphabets[language] <= GRAMMARS[language].letters


@pytest.mark.parametrize("language", LANGUAGES)
def test_same_seed_same_text_and_another_seed_or_split_another(language):
    first = list(documents(language, 3, "train", 20_000))
    assert first == list(documents(language, 3, "train", 20_000))
    assert first != list(documents(language, 4, "train", 20_000))
    assert not set(first) & set(documents(language, 3, "val", 20_000))


@pytest.mark.parametrize("language", LANGUAGES)
def test_size_is_reached_by_the_last_document_and_a_smaller_one_is_a_beginning(language):
    long, short = (list(documents(language, 0, "train", size)) for size in (50_000, 10_000))
    assert long[: len(short)] == short
    sizes = [len(document.encode()) for document in short]
    assert sum(sizes[:-1]) < 10_000 <= sum(sizes)


@pytest.mark.parametrize("language", LANGUAGES)
def test_words_follow_zipf_and_validation_uses_the_same_ones(language):
    train, val = (
        re.findall(r"\w+", text(language, 0, split, size).lower()) for split, size in (("train", 400_000), ("val", 60_000))
    )
    counts = [count for _, count in Counter(train).most_common()]
    assert len(counts) > 500  # inflected forms
    assert counts[0] > 20 * counts[200] > 20
    vocabulary = set(train)
    assert sum(word in vocabulary for word in val) > 0.97 * len(val)


def test_grammar_shows_verbs_come_last_in_one_language_and_not_in_another():
    def ends(language, ending):
        g = GRAMMARS[language]
        sentences = [s.strip() for d in documents(language, 0, "train", 50_000) for s in d.split(g.stop)]
        plain = [s for s in sentences if s and not s.endswith(g.question_mark)]
        return sum(s.endswith((ending, g.verb_plural)) for s in plain) / len(plain)

    assert ends("thelis", GRAMMARS["thelis"].past) > 0.6  # subject, object, verb
    assert ends("vesnar", GRAMMARS["vesnar"].past) < 0.3  # verb, subject, object


def test_everything_is_made_in_a_few_seconds():
    start = time.process_time()
    for language in LANGUAGES:
        for split, size in (("train", TRAIN_BYTES), ("val", val_limit(TRAIN_BYTES))):
            assert sum(len(d.encode()) for d in documents(language, 0, split, size)) >= size
    assert time.process_time() - start < 4


def test_an_unknown_language_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="did you mean 'auren'"):
        next(documents("aurin", 0, "train", 1))
