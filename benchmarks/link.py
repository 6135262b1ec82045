"""A network of a given speed between processes of this machine: network namespaces, a bridge, and tc."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence

__all__ = ["INTERFACE", "RATES", "LinkError", "ports"]

RATES = ("1gbit", "10gbit")
INTERFACE = "wire"
"""Of a rank, as Gloo is to be told."""
_PROGRAMS = ("unshare", "nsenter", "ip", "tc")

_SCRIPT = """
set -e
world=$1 rate=$2 burst=$3
ip link add hub type bridge
ip link set hub up
for rank in $(seq 0 $((world - 1))); do
  unshare -n sleep infinity &
  holder=$!
  for _ in $(seq 100); do
    [ "$(readlink /proc/$holder/ns/net)" != "$(readlink /proc/self/ns/net)" ] && break; sleep 0.05
  done
  ip link add port$rank type veth peer name wire netns $holder
  ip link set port$rank master hub up
  inside="nsenter -n -t $holder"
  $inside ip link set lo up
  $inside ip address add 10.77.0.$((rank + 1))/24 dev wire
  $inside ip link set wire up
  $inside tc qdisc add dev wire root tbf rate $rate burst $burst latency 50ms
  tc qdisc add dev port$rank root tbf rate $rate burst $burst latency 50ms
  echo holder $holder
done
echo ready
read _  # until the benchmark is over
kill $(jobs -p)
"""
_BURST = {"1gbit": "256kb", "10gbit": "2500kb"}


class LinkError(RuntimeError):
    """It cannot be made here."""


@contextlib.contextmanager
def ports(world: int, rate: str) -> Iterator[Callable[[int], Sequence[str]]]:
    """For a ``with`` statement: what to put before the command of a rank, which is then joined to the others
    by a link of `rate` in each direction.

    Raises:
        LinkError: why that cannot be.
    """
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        raise LinkError(f"there is no {', '.join(missing)}")
    command = ["unshare", "-Urn", "sh", "-c", _SCRIPT, "sh", str(world), rate, _BURST[rate]]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    try:
        holders: list[str] = []
        for line in process.stdout:
            if line.startswith("ready"):
                break
            holders.append(line.split()[1])
        else:
            said = " ".join(process.stderr.read().split())
            raise LinkError(said or "unshare failed")
        yield lambda rank: (
            *("nsenter", "--preserve-credentials", "-U", "-n", "-t", holders[rank], "--"),
        )
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        for holder in holders:
            subprocess.run(["kill", holder], capture_output=True, check=False)
        process.wait()
        process.stdout.close()
        process.stderr.close()
