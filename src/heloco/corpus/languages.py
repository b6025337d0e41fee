"""Five languages made by code: data that needs no download and is as non-IID as data gets.

Each has its own alphabet (no letter is shared), its own words (built from its own syllables, used with Zipf frequencies) and
its own grammar: word order, agreement, plural and object endings, punctuation. A document keeps to a topic and a verb to its
favourite objects, so there is something to learn beyond spelling. A language is fixed; the seed decides what is said in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from heloco.errors import UserError, nearest

Split = Literal["train", "val"]
Ids = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Words = npt.NDArray[np.object_]

TRAIN_BYTES = 1_000_000
VERSION = 1  # of what the code below writes: part of the cache key, so raise it when the text changes

_NOUNS, _VERBS, _ADJECTIVES, _PLACES, _TOPICS, _FAVOURITES = 150, 60, 40, 8, 10, 6
_DOCUMENTS_A_BLOCK = 64


@dataclass(frozen=True)
class Grammar:
    """What sets one language apart. `clause` orders S, V, O and P (a place); `phrase` orders D, A and N inside S and O."""

    vowels: str
    consonants: str
    syllables: tuple[str, ...]
    clause: str
    phrase: str
    articles: tuple[str, str, str, str]  # vowel-stem singular and plural, consonant-stem singular and plural; "" for none
    plural: str
    object: str
    past: str
    verb_plural: str
    conjunction: str
    question: str
    stop: str
    question_mark: str
    adposition_first: bool = True
    plural_first: bool = False
    capitals: bool = True

    @property
    def letters(self) -> frozenset[str]:
        """Every letter the language writes with, capitals and endings included."""
        endings = self.plural + self.object + self.past + self.verb_plural + self.conjunction + self.question
        small = self.vowels + self.consonants + endings + "".join(self.articles)
        return frozenset(small + small.upper())


GRAMMARS = {
    "arzhan": Grammar(
        vowels="աեիոօ", consonants="բգդզթլխկհմնշպսվտր", syllables=("CVC", "CV", "CVC", "VC"),
        clause="OSVP", phrase="AN", articles=("", "", "", ""), plural="եր", object="ին", past="եց", verb_plural="են",
        conjunction="ու", question="ինչ", stop="։", question_mark="՞", adposition_first=False, capitals=False,
    ),
    "auren": Grammar(
        vowels="aeiou", consonants="lmnrstdv", syllables=("CV", "CVC", "V", "CV"),
        clause="SVOP", phrase="DAN", articles=("la", "las", "un", "uns"), plural="s", object="", past="ed", verb_plural="n",
        conjunction="e", question="dou", stop=".", question_mark="?",
    ),
    "thelis": Grammar(
        vowels="αεηιοω", consonants="βγδθκλμνπρστφ", syllables=("CV", "VC", "CCV", "CV"),
        clause="PSOV", phrase="DNA", articles=("η", "αι", "ο", "οι"), plural="ες", object="ον", past="σα", verb_plural="τε",
        conjunction="και", question="τι", stop=".", question_mark=";",
    ),
    "vesnar": Grammar(
        vowels="аеиоуы", consonants="бвгджзклмнпрстхш", syllables=("CCV", "CVC", "CV"),
        clause="VSOP", phrase="NA", articles=("", "", "", ""), plural="ы", object="ам", past="ла", verb_plural="ут",
        conjunction="да", question="ли", stop="!", question_mark="?!",
    ),
    "zumeri": Grammar(
        vowels="āēīōū", consonants="čģķļņšžřťď", syllables=("CV", "CV", "CVCV"),
        clause="PVOS", phrase="NAD", articles=("ēņ", "ēž", "āņ", "āž"), plural="šō", object="ť", past="īč", verb_plural="ū",
        conjunction="žē", question="ķā", stop=" ·", question_mark=" ··", adposition_first=False,
        plural_first=True, capitals=False,
    ),
}  # fmt: skip
LANGUAGES = tuple(GRAMMARS)


def documents(language: str, seed: int, split: Split, size_bytes: int) -> Iterator[str]:
    """Documents of `language` until they hold `size_bytes` of UTF-8; a smaller size gives a beginning of a larger one."""
    if language not in GRAMMARS:
        raise UserError(f"There is no built-in language {language!r}: {nearest(language, LANGUAGES)}")
    speaker = _speaker(language)
    rng = np.random.default_rng([seed, LANGUAGES.index(language), ("train", "val").index(split)])
    size = 0
    while True:
        for text in speaker.block(rng):
            yield text
            size += len(text.encode())
            if size >= size_bytes:
                return


@cache
def _speaker(language: str) -> "_Speaker":
    return _Speaker(GRAMMARS[language], np.random.default_rng([0x0F5EED, LANGUAGES.index(language)]))


class _Speaker:
    """A language's lexicon as tables of inflected forms, each with the space before it, and the frequencies it speaks with."""

    def __init__(self, grammar: Grammar, rng: np.random.Generator) -> None:
        self.grammar = g = grammar
        words = _lexicon(g, rng, _NOUNS + _VERBS + _ADJECTIVES + _PLACES)
        nouns, verbs, rest = words[:_NOUNS], words[_NOUNS : _NOUNS + _VERBS], words[_NOUNS + _VERBS :]
        self.noun_class = np.array([stem[-1] not in g.vowels for stem in nouns], dtype=np.int64)
        self.nouns = _table([[[self._noun(n, many) + case for case in ("", g.object)] for many in (0, 1)] for n in nouns])
        self.verbs = _table([[[v + past + many for many in ("", g.verb_plural)] for past in ("", g.past)] for v in verbs])
        self.adjectives = _table([["", ""], *([a, self._noun(a, 1)] for a in rest[:_ADJECTIVES])])  # row 0: no adjective
        self.places = _table(rest[_ADJECTIVES:])
        self.articles = _table(g.articles).reshape(2, 2)
        self.topics = np.stack([rng.permutation(_NOUNS) for _ in range(_TOPICS)])
        self.favourites = rng.integers(_NOUNS, size=(_VERBS, _FAVOURITES))
        self.transitive = rng.random(_VERBS) < 0.7

    def _noun(self, stem: str, many: int) -> str:
        plural = self.grammar.plural if many else ""
        return plural + stem if self.grammar.plural_first else stem + plural

    def block(self, rng: np.random.Generator) -> Iterator[str]:
        """A block of documents. All choices are drawn as arrays; Python only joins the chosen words."""
        sentences = rng.integers(3, 10, size=_DOCUMENTS_A_BLOCK)
        clauses = 1 + (rng.random(int(sentences.sum())) < 0.3)  # per sentence: one, or two joined by the conjunction
        clause_sentence = np.repeat(np.arange(len(clauses)), clauses)
        starts = np.diff(clause_sentence, prepend=-1) > 0
        ends = np.append(starts[1:], True)
        topic = np.repeat(rng.integers(_TOPICS, size=_DOCUMENTS_A_BLOCK), sentences)[clause_sentence]
        asks = (rng.random(len(clauses)) < 0.12)[clause_sentence]
        texts = self._clauses(rng, topic, starts, ends, asks)
        bounds = np.cumsum(np.add.reduceat(clauses, np.cumsum(sentences) - sentences))
        for first, last in zip([0, *bounds[:-1]], bounds, strict=True):
            yield "".join(texts[first:last])[1:]

    def _clauses(self, rng: np.random.Generator, topic: Ids, starts: Flags, ends: Flags, asks: Flags) -> list[str]:
        g, n = self.grammar, len(topic)
        verb, subject = _zipf(rng, _VERBS, n), self.topics[topic, _zipf(rng, _NOUNS, n)]
        favourite = self.favourites[verb, _zipf(rng, _FAVOURITES, n)]
        object_ = np.where(rng.random(n) < 0.6, favourite, self.topics[topic, _zipf(rng, _NOUNS, n)])
        many, past = rng.integers(2, size=n), rng.integers(2, size=n)
        with_object, with_place = self.transitive[verb], rng.random(n) < 0.35
        place = [self.places[_zipf(rng, _PLACES, n)], self.nouns[self.topics[topic, _zipf(rng, _NOUNS, n)], 0, 0]]
        parts: dict[str, list[Words]] = {
            "S": self._phrase(rng, subject, many, case=0),
            "V": [self.verbs[verb, past, many]],
            "O": [np.where(with_object, w, "") for w in self._phrase(rng, object_, rng.integers(2, size=n), case=1)],
            "P": [np.where(with_place, w, "") for w in (place if g.adposition_first else place[::-1])],
        }
        opening = np.where(starts, np.where(asks, f" {g.question}", ""), f", {g.conjunction}")
        closing = np.where(ends, np.where(asks, g.question_mark, g.stop), "")
        columns = [opening, *(column for letter in g.clause for column in parts[letter]), closing]
        texts = ["".join(row) for row in np.stack(columns, axis=1).tolist()]
        if not g.capitals:
            return texts
        return [f" {t[1].upper()}{t[2:]}" if first else t for t, first in zip(texts, starts.tolist(), strict=True)]

    def _phrase(self, rng: np.random.Generator, noun: Ids, many: Ids, case: int) -> list[Words]:
        bare = rng.random(len(noun)) < 0.6
        adjective = np.where(bare, 0, 1 + _zipf(rng, _ADJECTIVES, len(noun)))
        words = {
            "D": self.articles[self.noun_class[noun], many],
            "A": self.adjectives[adjective, many],
            "N": self.nouns[noun, many, case],
        }
        return [words[letter] for letter in self.grammar.phrase]


def _lexicon(g: Grammar, rng: np.random.Generator, count: int) -> list[str]:
    """Distinct stems of one to three syllables, none of them a function word, in the order of their frequency rank."""
    letters = {"C": g.consonants, "V": g.vowels}
    used_words = {*g.articles, g.conjunction, g.question}
    stems: list[str] = []
    while len(stems) < count:
        shape = "".join(rng.choice(g.syllables) for _ in range(rng.choice([1, 2, 3], p=[0.2, 0.55, 0.25])))
        stem = "".join(letters[kind][rng.integers(len(letters[kind]))] for kind in shape)
        if len(stem) > 1 and stem not in used_words:
            used_words.add(stem)
            stems.append(stem)
    return stems


def _table(forms: object) -> Words:
    """The forms as an object array, every word with a space before it ("" stays "")."""
    table = np.array(forms, dtype=object)
    return np.frompyfunc(lambda word: f" {word}" if word else "", 1, 1)(table)  # type: ignore[no-any-return]


def _zipf(rng: np.random.Generator, size: int, count: int) -> Ids:
    """`count` ranks below `size`, rank r with a weight of 1 / (r + 2)."""
    cumulative = np.cumsum(1.0 / np.arange(2, size + 2))
    ranks: Ids = np.searchsorted(cumulative, rng.random(count) * cumulative[-1], side="right")
    return ranks
