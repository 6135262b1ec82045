"""Ask a server for its own sample, with the standard library alone, and print the answers:
python ask.py URL [VERSION]. With VERSION it asks until the server has a newer one, as under --follow."""

import json
import sys
import time
import urllib.error
import urllib.request

WAIT = 60.0
"""Seconds in which the server answers, and has the newer version."""


def ask(url, body=None):
    """The JSON of an answer, and the version of the model that gave it."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response), response.headers.get("x-model-version")


def main(url, before=None):
    url, end = url.rstrip("/"), time.monotonic() + WAIT
    while True:
        try:
            name = ask(f"{url}/v2/repository/index", {})[0][0]["name"]
            instances = ask(f"{url}/sample")[0]["instances"]
            answer, version = ask(f"{url}/v1/models/{name}:predict", {"instances": instances})
            if version != before:
                break
            problem = f"the version is still {before}"
        except urllib.error.URLError as error:  # it begins, or is busy
            problem = error
        if time.monotonic() > end:
            sys.exit(f"{url}: {problem} after {WAIT:g} s")
        time.sleep(0.2)
    print(json.dumps({"version": version, **answer}))


if __name__ == "__main__":
    main(*sys.argv[1:])
