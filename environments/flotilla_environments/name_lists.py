"""The names that tasks are made of, and their partition between splits.

Two partitions keep evaluation apart from training. Of every list the last 15 % are *novel*: RL
never trains on them. And every pair of names that identifies what a task is about belongs either
to training or to evaluation: to evaluation where both are novel, else by its SHA-256 (10 %).
"""

import hashlib
import random
from dataclasses import dataclass
from typing import Literal

Pool = Literal["train", "novel", "all"]

NOVEL_FRACTION = 0.15
HELDOUT_FRACTION = 0.10


def _split_words(text: str) -> list[str]:
    return text.split()


FIRST = _split_words("""
Ann Bob Carl Dana Eve Finn Gina Hugo Iris Jack Kate Leo Mia Noah Olga Paul Quinn Rosa Sam Tina Uma
Vera Walt Xena Yuri Zoe Adam Beth Cora Dirk Ella Fred Gwen Hans Ines Jill Kurt Lena Marc Nina Otto
Pia Rolf Sara Theo Ursula Victor Wendy Alan Bella Chris Doris Emil Fay Glen Hilda Igor June Karl
Lara Mona Nora Oscar Petra Ralf Silvia Tom Ulf Vince Wilma Amos Bruno Clara David Edith Felix Greta
Harry Ida Jonas Kim Luis Martha Nils Olive Pedro Rita Simon Tara Umberto Viola Will Agnes Boris
Celia Diego Elsa Frank Grace Henry Irene Jorge Klara Laura Max Naomi
""")
CITY = _split_words("""
Paris Rome Berlin Madrid Lisbon Vienna Prague Oslo Dublin Athens Warsaw Zurich Geneva Milan Naples
Turin Porto Seville Munich Hamburg Cologne Lyon Nice Bern Basel Ghent Bruges Riga Vilnius Tallinn
Helsinki Bergen Malmo Gdansk Krakow Brno Graz Linz Split Zagreb Sofia Varna Tokyo Kyoto Osaka Seoul
Delhi Mumbai Cairo Tunis Lagos Accra Lima Quito Bogota Boston Denver Austin Dallas Miami
""")
HOTEL = _split_words("""
Grand Plaza Royal Central Astoria Bristol Savoy Ritz Metro Park Garden Palace Crown Star Sun Moon
River Lake Harbor Forest Alpine Summit Valley Sunset Sunrise Pearl Coral Amber Ruby Emerald Silver
Golden Diamond Crystal Marble Ivory Maple Cedar Willow Aspen Falcon Eagle Swan Heron Phoenix Dragon
Lion Tiger Atlas Orion Apollo Luna Nova Vega Polaris Horizon Panorama Belvedere Bellevue Excelsior
""")
REPO = _split_words("""
core web api docs mobile infra search billing auth payments gateway scheduler parser compiler
runtime kernel editor viewer backend frontend toolkit engine pipeline storage cache proxy router
monitor logger metrics tracer notifier importer exporter indexer crawler renderer launcher updater
installer
""")
LABEL = _split_words("""
crash typo leak timeout deadlock regression overflow flicker latency freeze layout font login
logout upload download sync backup restore migration encoding locale theme shortcut tooltip scroll
zoom print
""")
ITEM = _split_words("""
apple banana cherry lemon mango melon olive onion peach pepper plum potato pumpkin radish tomato
walnut almond bread butter cheese coffee cookie cracker honey juice milk mustard noodle pasta rice
salt sugar syrup tea vinegar yogurt candle carpet chair clock curtain desk drawer fork kettle knife
lamp mirror mug pan pillow plate shelf sofa spoon stool table towel vase
""")


def split_pool(words: list[str], fraction: float = NOVEL_FRACTION) -> tuple[list[str], list[str]]:
    """Split a list into (train, novel): the last `fraction`, at least three words, is novel."""
    novel = max(3, int(len(words) * fraction))
    return words[:-novel], words[-novel:]


LISTS: dict[str, list[str]] = {
    "first": FIRST,
    "city": CITY,
    "hotel": HOTEL,
    "repo": REPO,
    "label": LABEL,
    "item": ITEM,
}


def _split_pools(words: list[str]) -> dict[Pool, list[str]]:
    train, novel = split_pool(words)
    return {"train": train, "novel": novel, "all": words}


_POOLS: dict[str, dict[Pool, list[str]]] = {
    name: _split_pools(words) for name, words in LISTS.items()
}


_NOVEL = frozenset(word for pools in _POOLS.values() for word in pools["novel"])


def is_heldout_pair(env_key: str, first: str, second: str) -> bool:
    """Return True for a pair of names, such as a guest and a city, that belongs to evaluation."""
    if first in _NOVEL and second in _NOVEL:
        return True
    digest = hashlib.sha256(f"{env_key}/{first}/{second}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELDOUT_FRACTION * 2**64


@dataclass(frozen=True)
class Names:
    """Source of names for one task of one environment."""

    rng: random.Random
    env_key: str
    pool: Pool
    heldout: bool

    def draw_some(self, kind: str, count: int, *, avoid: str | None = None) -> list[str]:
        """Draw `count` different names of a list."""
        names = self.rng.sample(_POOLS[kind][self.pool], count + (avoid is not None))
        return [name for name in names if name != avoid][:count]

    def draw_one(self, kind: str) -> str:
        return self.draw_some(kind, 1)[0]

    def draw_pair(self, first: str, second: str) -> tuple[str, str]:
        """Draw two names, one of each list, whose combination belongs to this task's split."""
        while True:
            pair = self.draw_one(first), self.draw_one(second)
            if is_heldout_pair(self.env_key, *pair) == self.heldout:
                return pair

    def draw_ids(self, count: int) -> list[int]:
        """Draw `count` different numbers of two digits."""
        return self.rng.sample(range(10, 100), count)
