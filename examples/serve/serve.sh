#!/bin/sh
# Train, export, serve and ask, on one machine: sh serve.sh [FOLDER]. The server follows the run, so that what a
# second epoch learns is served while it is trained; rows lie in two processes beside the server.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-serve-example}
mkdir -p "$folder"
cd "$folder"
python=${PYTHON:-python3}
train="hotbed train --data clicks.tsv --dim 8 --batch-size 256 --lr 0.01 --checkpoint run --every 2 --full-every 100"

echo "A click log, and a first epoch:"
"$python" -c 'from hotbed.data import write_criteo_tsv; write_criteo_tsv("clicks.tsv", rows=2000)'
"$python" -m $train

echo "Its bundle, and a server:"
"$python" -m hotbed export run bundle --data clicks.tsv --standalone
"$python" -m hotbed serve bundle --bind 127.0.0.1:0 --follow run --shards 2 2>server.log &
server=$!
trap 'kill $server 2>/dev/null; wait $server 2>/dev/null || true' EXIT
until url=$(sed -n 's/.* answers at \(http[^ ]*\).*/\1/p' server.log) && test -n "$url"; do
  kill -0 $server 2>/dev/null || { cat server.log >&2; exit 1; }
  sleep 0.1
done
answer=$("$python" "$here/ask.py" "$url")
echo "$answer"
version=$(echo "$answer" | sed 's/{"version": "\([^"]*\)".*/\1/')

echo "A second epoch, which the server follows:"
"$python" -m $train --epochs 2 --resume
"$python" "$here/ask.py" "$url" "$version"
