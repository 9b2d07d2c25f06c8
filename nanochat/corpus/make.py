"""Make the corpus beside this file: the same bytes of text every time, from a grammar and a seed.

    python nanochat/corpus/make.py

Six shards of uneven row groups, the last of which is the validation split; documents from a line to several pages.
"""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SHARDS = 6
DOCUMENTS = 3000  # a shard
ROW_GROUPS = 10  # a shard

NAMES = "Ada Bruno Chloé Dmitri Esra Farid Grace Hiro Ingrid Jamal Kofi Lucía Mei Nils Olga Priya Quentin Rosa Søren \
Tomáš Uma Viktor Wanda Xin Yara Zoë".split()
PLACES = "Aarhus Bergen Córdoba Dakar Essen Fukuoka Graz Haifa Izmir Jena Kraków Lima Malmö Nairobi Oulu Porto Quito \
Riga Sevilla Tartu Utrecht Valdivia Wrocław Xiamen York Zürich".split()
THINGS = "boat bridge clock kite lamp ladder letter map mill mirror oven piano rope saddle ship stove table tent train \
violin wagon well window wheel bicycle telescope barrel basket".split()
ANIMALS = "badger crane dog eel fox goat heron horse ibex jackdaw lynx magpie newt otter owl pike raven seal swan toad \
viper wolf".split()
COLOURS = "amber black blue brown copper green grey ivory olive pink purple red silver white yellow".split()
QUALITIES = "old new heavy light narrow wide quiet loud broken borrowed painted rusty warm cold famous forgotten \
crooked simple expensive".split()
VERBS = "built carried found lost repaired sold painted borrowed moved watched measured cleaned hid counted drew \
wanted opened".split()
TIMES = "in the morning|at noon|before sunrise|after the storm|in late summer|on the first of May|during the war|\
every winter|long ago|a week later|at half past nine|on market day".split("|")
REASONS = "because the river had risen|although nobody had asked|so that the children could sleep|while it rained|\
until the money ran out|as the law required|since the road was closed|for no reason at all|to win a bet".split("|")
FOODS = "barley beans bread butter carrots cheese cream dill eggs flour garlic honey leeks lentils milk mushrooms oats \
onions pears plums potatoes rice salt tomatoes vinegar yeast".split()
OPERATIONS = {"plus": lambda a, b: a + b, "minus": lambda a, b: a - b, "times": lambda a, b: a * b}


class Writer:
    """Sentences and documents from one stream of random numbers."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.pick = self.random.choice
        self.number = self.random.randint

    def thing(self):
        return f"{self.pick(QUALITIES)} {self.pick([*COLOURS, ''])} {self.pick(THINGS)}".replace("  ", " ")

    def sentence(self):
        name, other, place, animal = self.pick(NAMES), self.pick(NAMES), self.pick(PLACES), self.pick(ANIMALS)
        return self.pick(
            [
                f"{name} {self.pick(VERBS)} the {self.thing()} {self.pick(TIMES)}.",
                f"{name} and {other} {self.pick(VERBS)} a {self.thing()} in {place}, {self.pick(REASONS)}.",
                f"The {animal} of {place} is {self.pick(COLOURS)}, and it eats {self.pick(FOODS)} {self.pick(TIMES)}.",
                f"“Where is my {self.pick(THINGS)}?” asked {name}. “In {place},” said {other}.",
                f"It's {self.number(2, 980)} km from {place} to {self.pick(PLACES)}; {name} walked it.",
                f"In {self.number(1400, 1999)} the people of {place} {self.pick(VERBS)} {self.number(2, 99)} "
                f"{self.pick(THINGS)}s.",
                f"Nobody knows who {self.pick(VERBS)} it, {self.pick(REASONS)}.",
                f"{name}'s {animal} isn't afraid of the {self.pick(QUALITIES)} {self.pick(ANIMALS)}.",
            ]
        )

    def story(self, sentences):
        words = [self.sentence() for _ in range(sentences)]
        paragraphs = [" ".join(words[i : i + 5]) for i in range(0, sentences, 5)]
        return "\n\n".join(paragraphs)

    def sums(self, lines):
        made = []
        for _ in range(lines):
            a, b, (word, of) = self.number(0, 99), self.number(0, 99), self.pick(list(OPERATIONS.items()))
            made.append(f"{a} {word} {b} is {of(a, b)}.")
        return "\n".join(made)

    def recipe(self, lines):
        parts = [f"- {self.number(1, 900)} g {self.pick(FOODS)}" for _ in range(max(3, lines))]
        steps = f"Mix, wait {self.number(5, 90)} minutes, bake at {self.number(140, 240)} °C."
        return f"# {self.pick(FOODS).title()} as in {self.pick(PLACES)}\n\n" + "\n".join(parts) + f"\n\n{steps}"

    def log(self, lines):
        made = [
            f"{self.number(1950, 2024)}-{self.number(1, 12):02d}-{self.number(1, 28):02d}\t{self.pick(PLACES)}\t"
            f"{self.number(-20, 38)}.{self.number(0, 9)}\t{self.pick(['☀', '☁', '☂', '❄', 'fog'])}"
            for _ in range(lines)
        ]
        return "date\tplace\t°C\tsky\n" + "\n".join(made)

    def code(self, lines):
        made = [
            f"    {self.pick(THINGS)}_{self.number(1, 9)} = {self.pick(ANIMALS)}({self.number(0, 255)}, "
            f'"{self.pick(COLOURS)}")'
            for _ in range(lines)
        ]
        return f"def {self.pick(VERBS)}_{self.pick(THINGS)}({self.pick(ANIMALS)}):\n" + "\n".join(made)

    def foreign(self, lines):
        said = [
            "Où est la gare ?",
            "Das Wetter ist schön.",
            "¿Qué hora es?",
            "Это мой дом.",
            "今日は雨です。",
            "안녕하세요!",
        ]
        return "\n".join(f"{self.pick(NAMES)}: {self.pick(said)} 🙂" for _ in range(lines))

    def document(self):
        size = max(1, min(60, round(self.random.lognormvariate(1.5, 0.9))))
        kind = self.random.choices(
            [self.story, self.sums, self.recipe, self.log, self.code, self.foreign], [60, 10, 10, 8, 8, 4]
        )[0]
        return kind(size)


def shard(index):
    """The documents of a shard, cut into its row groups: a list of lists of strings."""
    writer = Writer(f"nanochat corpus {index}")
    documents = [writer.document() for _ in range(DOCUMENTS)]
    cuts = sorted(writer.random.sample(range(50, DOCUMENTS, 50), ROW_GROUPS - 1))
    return [documents[a:b] for a, b in zip([0, *cuts], [*cuts, DOCUMENTS], strict=True)]


def main():
    for index in range(SHARDS):
        path = Path(__file__).with_name(f"shard_{index:05d}.parquet")
        schema = pa.schema([("text", pa.string())])
        with pq.ParquetWriter(path, schema, compression="zstd", compression_level=19) as file:
            for texts in shard(index):
                file.write_table(pa.table({"text": texts}, schema=schema), row_group_size=len(texts))
        print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
