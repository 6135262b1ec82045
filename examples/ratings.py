"""Ratings with ids as text: a CSV file in, predictions out.

python examples/ratings.py ratings.csv predictions.csv

Without a file of your own, one is made: who read what, of which genres, and whether they liked it.
"""

import csv
import os
import random
import sys

import torch

import hotbed as hb

GENRES = ["crime", "poetry", "travel", "history", "garden"]


def write_ratings(path: str, rows: int = 30_000) -> None:
    draw = random.Random(0)
    with open(path, "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["liked", "reader", "book", "genres", "age"])
        for _ in range(rows):
            reader, book = draw.randrange(300), draw.randrange(500)
            genres = sorted({GENRES[book % 5], draw.choice(GENRES)})
            chance = 0.8 if GENRES[reader % 5] in genres else 0.2
            liked = int(draw.random() < chance)
            out.writerow([liked, f"r-{reader}", f"978-{book}", "|".join(genres), 18 + reader % 60])


def main(path: str, predictions: str) -> None:
    if not os.path.exists(path):
        write_ratings(path)
    torch.manual_seed(0)
    schema = hb.data.Schema(
        {
            "liked": hb.data.Label(),
            "reader": hb.data.Id(),
            "book": hb.data.Id(),
            "genres": hb.data.Ids(separator="|"),
            "age": hb.data.Number("log"),
        }
    )
    train, test = hb.data.open(path, schema, batch_size=256, seed=0).split(0.1)
    model = hb.models.DeepFM.from_schema(schema, dim=16, hidden=[32], seed=0)
    optimizer = hb.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(2):
        hb.train.fit(model, train, optimizer)
        found = hb.train.evaluate(model, test)
        print(f"epoch {epoch + 1}: loss {found.logloss:.4f}, AUC {found.auc:.3f}")
    hb.save("ratings", model, optimizer, step=2 * len(train))

    served = hb.checkpoint.load_model("ratings")  # with its schema, so it takes raw text
    with open(predictions, "w", newline="") as file:
        out = csv.writer(file)
        for _, logits in hb.train.scored(served, hb.data.open(path, served.schema)):
            out.writerows([f"{chance:.4f}"] for chance in logits.sigmoid().tolist())


if __name__ == "__main__":
    main(*sys.argv[1:])
