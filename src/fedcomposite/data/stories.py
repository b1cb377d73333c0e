"""Made-up stories for language models, as numbered words: a corpus without a file, a licence or anybody's words.

A story is on one topic, whose nouns, verbs and adjectives no other topic has. It has a hero, a noun of the topic, that
most of its sentences are about: who predicts the next word well has to find the topic and to look back for the hero.
Every client's topics are drawn from Dirichlet(alpha): small alpha, and clients tell of little else than one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedcomposite._validation import Count, Positive, check_call
from fedcomposite.data.silos import DataError, Seed, Share, Silos

TOPICS = {
    "sea": ("sailor wave gull harbour anchor whale", "sails dives drifts floats", "salty stormy deep blue"),
    "farm": ("farmer cow barn tractor field goat", "ploughs grazes sows harvests", "muddy green fertile rural"),
    "kitchen": ("cook oven pan soup knife spoon", "boils fries tastes bakes", "hot sweet spicy burnt"),
    "forest": ("fox oak owl path stream hunter", "hides creeps howls climbs", "dark mossy wild silent"),
    "city": ("tram street tower clerk bridge market", "rushes waits shops parks", "busy loud crowded narrow"),
    "space": ("rocket planet comet pilot moon probe", "orbits lands launches glows", "distant cold bright round"),
    "school": ("teacher pupil book desk bell lesson", "reads writes listens learns", "clever strict new long"),
    "winter": ("snow sledge skater icicle scarf bear", "freezes slides shivers melts", "white icy warm soft"),
}
"""Nouns, verbs and adjectives by topic."""

_SENTENCES = (
    "the NOUN VERB .",
    "the ADJECTIVE NOUN VERB and VERB .",
    "then the NOUN VERB near the OTHER .",
    "a OTHER sees the ADJECTIVE NOUN .",
    "the NOUN VERB because the OTHER VERB .",
)
_LOYAL = 0.8  # of the sentences are about the hero


def _words() -> tuple[str, ...]:
    common = {word for sentence in _SENTENCES for word in sentence.split() if not word.isupper()}
    return (*sorted(common), *(word for parts in TOPICS.values() for part in parts for word in part.split()))


WORDS = _words()
"""What each number stands for."""

_NUMBER = {word: i for i, word in enumerate(WORDS)}


def _story(topic: str, length: int, rng: np.random.Generator) -> list[int]:
    nouns, verbs, adjectives = (part.split() for part in TOPICS[topic])
    hero, told = rng.choice(nouns), list[str]()
    while len(told) < length:
        noun = hero if rng.random() < _LOYAL else rng.choice(nouns)
        chosen = {"NOUN": [noun], "OTHER": nouns, "VERB": verbs, "ADJECTIVE": adjectives}
        told += [rng.choice(chosen.get(word, [word])) for word in rng.choice(_SENTENCES).split()]
    return [_NUMBER[word] for word in told[:length]]


def stories(
    *,
    clients: Count = 10,
    samples: Count = 100,
    length: Count = 32,
    alpha: Positive = 1.0,
    seed: Seed = 0,
    test: Share = 0.0,
    validation: Share = 0.0,
) -> Silos:
    """So many stories per client; features are the words but the last, targets the word that follows each.

    ``test`` and ``validation`` are the shares of each silo that are held out.
    """
    check_call("stories", stories, locals(), DataError)
    rng = np.random.default_rng(seed)
    arrays: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
    for share in rng.dirichlet(np.full(len(TOPICS), alpha), clients):
        told = [_story(topic, length + 1, rng) for topic in rng.choice(list(TOPICS), samples, p=share)]
        words = np.array(told, np.int64)
        arrays.append((words[:, :-1], words[:, 1:]))
    silos = Silos.from_arrays(arrays)
    return silos.split(test, seed, validation) if test or validation else silos
