#!/bin/sh
# The path of a newcomer, who has run `make demo`: change an example, train on a CSV file with ids as text, predict.
# Usage: tools/newcomer.sh BIN, the folder of `python` and `hotbed`, from the root of the checkout.
set -eu
bin=$(cd "$1" && pwd)
root=$(pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

echo "An example, with another model:"
sed 's/DeepFM/DCN/' "$root/examples/ratings.py" >mine.py
"$bin/python" mine.py ratings.csv predictions.csv
test "$(wc -l <predictions.csv)" -eq 30000

echo "A file of one's own, by the command line:"
"$bin/python" - <<'END'
import random
random.seed(1)
with open("visits.csv", "w") as file:
    file.write("clicked,visitor,page,minutes\n")
    for _ in range(5000):
        visitor, page = random.randrange(50), random.randrange(40)
        clicked = int(random.random() < (0.9 if (visitor + page) % 2 else 0.1))
        file.write(f"{clicked},visitor-{visitor},/page/{page},{random.randrange(1, 60)}\n")
END
"$bin/hotbed" data stats visits.csv --out schema.toml
"$bin/hotbed" train --data visits.csv --schema schema.toml --model deepfm --set hidden=32 --lr 0.01 --epochs 4 \
  --batch-size 128 --save model --json figures.json
"$bin/hotbed" predict model --data visits.csv --out scores.csv
test "$(wc -l <scores.csv)" -eq 5001
"$bin/python" -c "import json; auc = json.load(open('figures.json'))['auc']; assert auc > 0.8, auc"
echo "From a CSV file to predictions: all steps went."
