"""Runs one rank function under plain torchrun: `torchrun --nproc-per-node=2 nanochat_gate/replay.py ...`.

Used for the requirements that must hold under the real launcher, and by hand from the lines a failure prints.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() != ROOT / "nanochat_gate"]
    sys.path.insert(0, str(ROOT))

import argparse
import json
import os
import tempfile
from typing import Any

from nanochat_gate import observe, rank, server, target, wire


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("function", help="suites/area/file.py:function")
    parser.add_argument("args", nargs="?", default="[]", help="JSON list of its arguments")
    parser.add_argument("--nanochat", default=str(ROOT))
    parser.add_argument("--group", choices=("target", "provided"), help="make a process group first")
    parser.add_argument("--lane", default="plain", choices=("plain", "withheld", "withheld-native"))
    parser.add_argument("--out", help="folder for each rank's result; default: print it")
    asked = parser.parse_args()
    server.isolate()
    found = target.find(asked.nanochat)
    file, _, name = asked.function.rpartition(":")
    out = asked.out or tempfile.mkdtemp(prefix="replay-")
    number, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    trace = Path(out) / f"rank{number}.trace"
    trace.write_bytes(bytes(observe.TRACE_BYTES))
    sys.path.insert(0, str(found.import_root))
    recorder = observe.Recorder(
        observe.Trace(str(trace)), str(found.root), asked.lane != "plain", asked.lane == "withheld"
    )
    observe.install(recorder)
    spec: dict[str, Any] = {
        "rank": number,
        "size": size,
        "backend": "gloo",
        "group": asked.group,
        "target": found.for_ranks(),
        "ports": [],
    }
    this = rank.Rank(spec, recorder)
    rank.reseed(asked.function, number)
    try:
        if asked.group:
            this.join()
        result = rank.resolve(str((ROOT / file).resolve()), name)(this, *json.loads(asked.args))
    except BaseException as error:
        (Path(out) / f"rank{number}.error").write_text(json.dumps(rank.describe(error, this.target)))
        raise
    if asked.out:
        partial = Path(out) / f"rank{number}.part"
        partial.write_bytes(wire.pack(result))
        partial.rename(Path(out) / f"rank{number}.pt")
    else:
        print(f"rank {number}: {result}", flush=True)


if __name__ == "__main__":
    main()
