#!/usr/bin/env python3
"""Checks what the workers of one MoE layer did in one forward and one backward pass, as ./train --trace --trace-layer wrote.

    tests/timeline.py FILE LAYER

Prints how many events of each kind there are, and what is wrong; exit code 1 if something is.
"""

import json
import sys
from collections import Counter, defaultdict

ROWS = 128  # of a row block
# By pass: tasks of rows, then others, then moves. A block of rows has as many tiles of a kind as any other one.
OF_ROWS = {"forward": ["gate/up", "down"], "backward": ["d hidden", "d x"]}
OTHERS = {
    "forward": ["shared gate/up", "shared down"],
    "backward": ["d w2", "d w13", "shared d hidden", "shared d x", "shared d w2", "shared d w13"],
}
# The GPU's clock may tick once in a microsecond; marks are told to half of one.
NEAR = 2.0

wrong = []


def expect(holds, message):
    if not holds:
        wrong.append(message)


def end(event):
    return event["ts"] + event["dur"]


def check_tracks(names, tracks):
    """One thing at a time; nothing dropped."""
    for track, events in tracks.items():
        events.sort(key=lambda e: e["ts"])
        for one, next_one in zip(events, events[1:]):
            expect(next_one["ts"] >= end(one) - 1e-6, f"{names[track]['name']}: {one} and {next_one} overlap")
    for name in names.values():
        expect("dropped" not in name, f"{name} dropped events")


def blocks_of(events):
    """Row block -> how many of the events are of it."""
    return Counter(e["args"]["row"] // ROWS for e in events)


def check_pass(direction, events):
    kinds = defaultdict(list)
    for e in events:
        kinds[e["name"]].append(e)
    print(direction, {kind: len(kinds[kind]) for kind in sorted(kinds)})
    known = [*OF_ROWS[direction], *OTHERS[direction], "pull", "push"]
    for kind in known:
        expect(kinds[kind], f"{direction}: found no event {kind}")
    for kind in set(kinds) - {*known, "wait"}:
        expect(False, f"{direction}: found {kind}")
    pulled = blocks_of(kinds["pull"])
    for kind in [*OF_ROWS[direction], "push"]:
        blocks = blocks_of(kinds[kind])
        expect(set(blocks) == set(pulled), f"{direction}: rows of {kind} are not those that were pulled")
        expect(len(set(blocks.values())) == 1, f"{direction}: {kind} is not the same for all row blocks: {blocks}")
    each = max(pulled.values(), default=1)
    wanted = sorted(block * ROWS + i * (ROWS // each) for block in pulled for i in range(each))
    expect(sorted(e["args"]["row"] for e in kinds["pull"]) == wanted, f"{direction}: not every row was pulled once")


def main():
    path, layer = sys.argv[1], int(sys.argv[2])
    with open(path, encoding="utf-8") as file:
        items = json.load(file)["traceEvents"]
    names = {i["tid"]: i["args"] for i in items if i["ph"] == "M" and i["name"] == "thread_name"}
    tracks = defaultdict(list)
    for item in items:
        if item["ph"] == "X" and names[item["tid"]]["name"] not in ("step", "device"):
            tracks[item["tid"]].append(item)
    check_tracks(names, tracks)

    spans = [i for i in items if i["name"] == "megakernel" and i["args"]["layer"] == layer]
    expect(len(spans) == 2, f"found {len(spans)} passes of layer {layer}, wanted 2")
    inside = defaultdict(list)
    for event in (e for events in tracks.values() for e in events):
        expect(event["args"]["layer"] == layer, f"{event} is of another layer")
        at = [i for i, s in enumerate(spans) if s["ts"] - NEAR <= event["ts"] and end(event) <= end(s) + NEAR]
        expect(at, f"{event} is in none of the passes {spans}")
        inside[at[0] if at else -1].append(event)
    for i, direction in enumerate(OF_ROWS):
        check_pass(direction, inside[i])
    for line in wrong[:10]:
        print(line)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
