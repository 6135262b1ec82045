#!/bin/sh
# Export a model, serve it at a free port, ask it for one sample and end the server.
# Usage: tools/demo_answers.sh BIN RUN LOG BUNDLE, from the root of the checkout.
set -eu
bin=$1 run=$2 log=$3 bundle=$4
if ! "$bin/python" -c 'import onnx, onnxscript, onnxruntime, uvicorn, starlette, aiohttp' 2>/dev/null; then
  echo "To ask the model: $bin/python -m pip install 'hotbed[export,serve]', and make demo again."
  exit 0
fi
echo "Exporting it, and serving the bundle:"
"$bin/hotbed" export "$run" "$bundle" --data "$log"
"$bin/hotbed" serve "$bundle" --bind 127.0.0.1:0 2>"$bundle.log" &
server=$!
trap 'kill $server 2>/dev/null; wait $server 2>/dev/null || true' EXIT
trap 'exit 1' INT TERM
url=
while test -z "$url"; do
  kill -0 $server 2>/dev/null || { cat "$bundle.log" >&2; exit 1; }
  sleep 0.1
  url=$(sed -n 's/.* answers at \(http[^ ]*\).*/\1/p' "$bundle.log")
done
echo "Asked at $url for the clicks of its sample, it answers:"
"$bin/python" examples/serve/ask.py "$url"
