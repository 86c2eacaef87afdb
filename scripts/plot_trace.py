#!/usr/bin/env python3
"""Draws what `./train --trace FILE` recorded, and says how much of the moving is hidden behind multiplying.

    scripts/plot_trace.py FILE -o PICTURE.png                                the whole step
    scripts/plot_trace.py FILE -o PICTURE.png --layer 3 --pass backward      one pass of one MoE layer
    scripts/plot_trace.py FILE                                               the table alone

The picture has a row for every worker of every rank, and below them a strip per rank: how many of its workers multiply
and how many move rows at each moment. Dispatch is hidden where both colours lie above each other. In the table pause is the
mean time from an event to the next one of its kind, where no other work came between. Without --layer and
--pass the phases of the step are rows too. A pass that occurs in every micro-batch is drawn as in the first.

A GPU's blocks do several things at once: they have three bands of thin rows, for what blocks multiply, pull and push, and
in the strip a line for those that move. Of a GPU one layer is recorded, see --trace-layer of ./train.

The table needs Python alone, the picture matplotlib as well.
"""

import argparse
import bisect
import json
import sys
from collections import defaultdict, namedtuple

Event = namedtuple("Event", "begin end kind category layer")

MOVING = {"pull": "#0b4f9e", "push": "#55b4ea"}
MULTIPLYING = {
    "gate/up": "#d7301f",
    "down": "#fdb13b",
    "d hidden": "#762a83",
    "d x": "#e78ac3",
    "d w2": "#8c5a2b",
    "d w13": "#c8a06e",
    "shared gate/up": "#00897b",
    "shared down": "#b5bd00",
    "shared d hidden": "#4db6ac",
    "shared d x": "#d6db74",
    "shared d w2": "#2e7d32",
    "shared d w13": "#8bc34a",
}
WAITING = {"wait": "#dcdcdc"}
OTHER = ["#5c6bc0", "#37474f"]
PHASES = ["#8dd3c7", "#ffed6f", "#bebada", "#fb8072", "#80b1d3", "#fdb462", "#b3de69", "#fccde5", "#d9d9d9", "#bc80bd"]
STRIP_COLORS = {"multiply": "#f08a5d", "move": "#2f7fc1"}
# What tracks are of: a rank's phases, CPU threads, or what GPU blocks multiply, pull and push.
ROLES = STEP, WORKERS, MULTIPLY, PULL, PUSH = "step", "workers", "multiply", "pull", "push"


def fail(place, message):
    print(f"plot_trace.py: error: {place}: {message}", file=sys.stderr)
    sys.exit(2)


# ---- the file ----


class Track:
    """One row: a worker of a rank, something of a GPU's block, or the rank's own phases."""

    def __init__(self, rank, number):
        self.rank, self.number = rank, number
        self.name, self.dropped, self.events = f"track {number}", 0, []

    @property
    def is_worker(self):
        return self.name != "step"

    @property
    def role(self):
        words = self.name.split()
        if self.name == "step":
            return STEP
        if words[0] in ("block", "mover"):
            return words[2] if len(words) > 2 else MULTIPLY
        return WORKERS

    @property
    def owner(self):
        """The block of "block 7 push", the mover of "mover 0 pull 11", or the worker."""
        return " ".join(self.name.split()[:2])


def read_tracks(path):
    try:
        with open(path, encoding="utf-8") as file:
            items = json.load(file)["traceEvents"]
    except OSError as error:
        fail(path, f"cannot be read: {error.strerror}; write one with ./train --trace FILE")
    except (ValueError, KeyError, TypeError) as error:
        fail(path, f"found no trace ({error!r}), wanted JSON with traceEvents; write one with ./train --trace FILE")
    tracks = {}
    try:
        for item in items:
            add_item(tracks, item)
    except (KeyError, TypeError, AttributeError) as error:
        fail(path, f"found an event without its fields ({error!r}); write the trace again with ./train --trace FILE")
    # Operations are in the table that ./train prints, and in Perfetto.
    return [tracks[key] for key in sorted(tracks) if tracks[key].name != "device"]


def add_item(tracks, item):
    key = item["pid"], item["tid"]
    if item["ph"] == "M" and item["name"] == "thread_name":
        track = tracks.setdefault(key, Track(*key))
        track.name, track.dropped = item["args"]["name"], item["args"].get("dropped", 0)
    elif item["ph"] == "X" and item["cat"] != "operation":
        layer = item.get("args", {}).get("layer")
        event = Event(item["ts"], item["ts"] + item["dur"], item["name"], item["cat"], layer)
        tracks.setdefault(key, Track(*key)).events.append(event)


# ---- what is shown ----


class View:
    """Tracks to show, and from where to where in each rank."""

    def __init__(self, title, tracks, windows):
        self.title, self.tracks = title, tracks
        self.begin = min(begin for begin, _ in windows.values())
        self.end = max(self.begin + 1e-3, *(end for _, end in windows.values()))  # a nanosecond at least
        self.ranks = sorted(windows)

    def workers(self, rank, role=None):
        return [t for t in self.tracks if t.rank == rank and t.is_worker and role in (None, t.role)]

    def blocks(self, rank):
        """Those of a GPU that multiply; a CPU has none."""
        return len(self.workers(rank, MULTIPLY))

    def moving(self, rank):
        """Of every worker the moments in which it moves rows, none twice."""
        owners = defaultdict(list)
        for track in self.workers(rank):
            owners[track.owner] += [e for e in track.events if e.category == "move"]
        return [interval for events in owners.values() for interval in unite(events)]

    def events(self, rank, category=None):
        return [e for t in self.workers(rank) for e in t.events if category in (None, e.category)]


def view_step(tracks):
    """Without the rows that are empty in every rank; a worker without work is shown beside others that have some."""
    used = {t.is_worker for t in tracks if t.events}
    ranks = {t.rank for t in tracks if t.events}
    tracks = [t for t in tracks if t.is_worker in used and t.rank in ranks]
    windows = {}
    for rank in ranks:
        events = [e for t in tracks if t.rank == rank for e in t.events]
        windows[rank] = min(e.begin for e in events), max(e.end for e in events)
    return View("whole step", tracks, windows)


def view_pass(path, tracks, layer, direction):
    phase = f"moe {direction}"
    passes = defaultdict(lambda: defaultdict(list))  # layer -> rank -> its events
    for track in tracks:
        for event in track.events:
            if not track.is_worker and event.kind == phase:
                passes[event.layer][track.rank].append(event)
    if not passes:
        fail(path, f'found no phase "{phase}" on the tracks "step", wanted one; leave out --layer and --pass')
    if layer is None:
        recorded = {e.layer for track in tracks if track.is_worker for e in track.events}
        layer = min(recorded & set(passes) or passes)
    if layer not in passes:
        known = ", ".join(str(known) for known in sorted(passes))
        fail("--layer", f"found {layer}, wanted a layer with experts: {known}")

    windows = {rank: (events[0].begin, events[0].end) for rank, events in passes[layer].items()}
    shown = []
    for track in tracks:
        if track.is_worker and track.rank in windows:
            begin, end = windows[track.rank]
            cut = Track(track.rank, track.number)
            cut.name = track.name
            cut.events = [e for e in track.events if begin <= (e.begin + e.end) / 2 <= end and e.layer == layer]
            shown.append(cut)
    if not any(track.events for track in shown):
        fail(path, f"found no events of workers in layer {layer}, {direction}, wanted some; train with --moe mok "
                   f"(on a GPU one layer is recorded: --trace-layer {layer})")
    count = max(len(events) for events in passes[layer].values())
    title = f"layer {layer}, {direction}" + (f", first of {count} micro-batches" if count > 1 else "")
    return View(title, shown, windows)


def choose_view(options):
    tracks = read_tracks(options.file)
    for track in tracks:
        if track.dropped:
            print(f"{track.dropped} events of {track.name} of rank {track.rank} did not fit the trace", file=sys.stderr)
    if not any(track.events for track in tracks):
        fail(options.file, "found no events, wanted some; trace a step of a run with ./train --trace FILE")
    if options.rank is not None:
        ranks = sorted({t.rank for t in tracks})
        if options.rank not in ranks:
            fail("--rank", f"found {options.rank}, wanted one of {', '.join(map(str, ranks))}")
        tracks = [t for t in tracks if t.rank == options.rank]
    if options.layer is None and options.direction is None:
        return view_step(tracks)
    return view_pass(options.file, tracks, options.layer, options.direction or "forward")


# ---- the table ----


def unite(events):
    """Sorted intervals without overlaps that cover the same moments."""
    united = []
    for begin, end in sorted((e.begin, e.end) for e in events):
        if united and begin <= united[-1][1]:
            united[-1][1] = max(united[-1][1], end)
        else:
            united.append([begin, end])
    return united


def overlap(moving, multiplying):
    """Share of the moving time during which something multiplied; None if nothing moved."""
    united = unite(multiplying)
    begins, before = [begin for begin, _ in united], [0.0]  # before[i]: covered in front of interval i
    for begin, end in united:
        before.append(before[-1] + end - begin)

    def covered(moment):
        i = bisect.bisect_right(begins, moment) - 1
        return 0.0 if i < 0 else before[i] + min(moment, united[i][1]) - begins[i]

    total = sum(e.end - e.begin for e in moving)
    return sum(covered(e.end) - covered(e.begin) for e in moving) / total if total else None


def find_pauses(tracks):
    """Of every kind the times from an event's end to the next one's begin, where that is of its kind; waits do not count."""
    pauses = defaultdict(list)
    for track in tracks:
        events = sorted(e for e in track.events if e.kind not in WAITING)
        for event, after in zip(events, events[1:]):
            if event.kind == after.kind:
                pauses[event.kind].append(after.begin - event.end)
    return pauses


def print_kinds(rank, what, tracks, duration):
    """Shares are of the duration of all these tracks."""
    times, pauses = defaultdict(list), find_pauses(tracks)
    for track in tracks:
        for e in track.events:
            times[e.kind].append(e.end - e.begin)
    for kind in sorted(times, key=kind_order):
        each, total, available = sorted(times[kind]), sum(times[kind]), duration * len(tracks)
        share = 100 * total / available if available else 0
        pause = f"{sum(pauses[kind]) / len(pauses[kind]):.1f}" if pauses[kind] else "-"
        print(f"{rank:>4}  {what:<8} {kind:<16} {len(each):>8} {total:>14,.1f} {share:>8.1f} % "
              f"{each[len(each) // 2]:>10,.1f} {each[len(each) * 9 // 10]:>10,.1f} {pause:>8}")


def print_table(view):
    duration = view.end - view.begin
    print(f"{view.title}: {duration:,.1f} us")
    print(f"{'rank':>4}  {'tracks':<8} {'kind':<16} {'events':>8} {'us':>14} {'share':>10} "
          f"{'median us':>10} {'p90 us':>10} {'pause us':>8}")
    for rank in view.ranks:
        for track in view.tracks:
            if track.rank == rank and not track.is_worker:
                print_kinds(rank, "step", [track], duration)
        for role in ROLES:
            print_kinds(rank, role, view.workers(rank, role), duration)
    for rank in view.ranks:
        share = overlap(view.events(rank, "move"), view.events(rank, "compute"))
        if share is not None:
            who = "block" if view.blocks(rank) else "worker"
            print(f"rank {rank}: during {100 * share:.1f} % of its moving time a {who} of the rank multiplied")


def kind_order(kind):
    known = [*MOVING, *MULTIPLYING]
    return (2 if kind in WAITING else 0 if kind in known else 1), known.index(kind) if kind in known else 0, kind


# ---- the picture: sizes in inches, 100 pixels each ----

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 14.0, 1.55, 2.15, 0.55, 0.65
RANK_GAP, STRIP_GAP = 0.18, 0.10
BAND = {MULTIPLY: 2.6, PULL: 1.3, PUSH: 1.3}  # all rows of a GPU's blocks
HATCH = "/////"


def import_matplotlib():
    try:
        import matplotlib
    except ImportError:
        fail("matplotlib", "found none, wanted it for the picture; python3 -m pip install matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot

    matplotlib.rcParams.update({"font.size": 11, "hatch.linewidth": 0.6, "hatch.color": "#9a9a9a"})
    return matplotlib.pyplot


def choose_colors(view):
    """Colour of every kind that occurs: those of workers, then phases."""
    workers = {e.kind for t in view.tracks if t.is_worker for e in t.events}
    phases = list(dict.fromkeys(e.kind for t in view.tracks if not t.is_worker for e in t.events))
    known = {**MOVING, **MULTIPLYING, **WAITING}
    others = [kind for kind in sorted(workers, key=kind_order) if kind not in known]
    known.update((kind, OTHER[i % len(OTHER)]) for i, kind in enumerate(others))
    return (
        {kind: known[kind] for kind in sorted(workers, key=kind_order)},
        {kind: PHASES[i % len(PHASES)] for i, kind in enumerate(phases)},
    )


Row = namedtuple("Row", "top height track")
Band = namedtuple("Band", "top bottom role")


def place_rows(view):
    """The rows of all tracks, the bands of a GPU's blocks, the middle of every rank; the total. In inches from the top."""
    pitch = min(0.26, max(0.08, 10.0 / max(1, sum(track.role in (STEP, WORKERS) for track in view.tracks))))
    bands_height = min(1.0, 3.0 / len(view.ranks))
    rows, bands, middles, y = [], [], {}, 0.0
    for rank in view.ranks:
        first = y
        for role in ROLES:
            tracks = [t for t in view.tracks if t.rank == rank and t.role == role]
            height = BAND[role] * bands_height / len(tracks) if role in BAND and tracks else pitch
            rows += [Row(y + i * height, height, track) for i, track in enumerate(tracks)]
            if role in BAND and tracks:
                bands.append(Band(y, y + BAND[role] * bands_height, role))
                y += RANK_GAP / 2
            y += height * len(tracks)
        middles[rank] = (first + y) / 2
        y += RANK_GAP
    return rows, bands, middles, y - RANK_GAP


def join_bars(events, apart):
    """Begin, end, kind of bars: neighbours of a kind that are less than so far apart are one."""
    bars = []
    for e in sorted(events, key=lambda e: e.begin):
        if bars and bars[-1][2] == e.kind and e.begin - bars[-1][1] < apart:
            bars[-1][1] = max(bars[-1][1], e.end)
        else:
            bars.append([e.begin, e.end, e.kind])
    return bars


def draw_rows(axes, view, rows, colors):
    pixel = (view.end - view.begin) / (100 * (WIDTH - LEFT - RIGHT))
    for y, height, track in rows:
        thin = track.role in BAND
        gap = 0 if thin else 0.06 * height
        spans = defaultdict(list)
        for begin, end, kind in join_bars(track.events, pixel if thin else 0):
            spans[kind].append((begin - view.begin, end - begin))
        for kind in sorted(spans, key=lambda kind: -kind_order(kind)[0]):  # what waits lies below
            hatch = HATCH if kind in WAITING and not thin else None
            axes.broken_barh(spans[kind], (y + gap, height - 2 * gap), facecolors=colors[kind], linewidth=0, hatch=hatch)


def name_phases(axes, view, rows):
    """The name of a phase in its bar where there is room."""
    pixels = 100 * (WIDTH - LEFT - RIGHT) / (view.end - view.begin)
    for y, height, track in rows:
        for e in () if track.is_worker else track.events:
            if (e.end - e.begin) * pixels > 7.0 * len(e.kind) + 8:
                x = (e.begin + e.end) / 2 - view.begin
                axes.text(x, y + 0.52 * height, e.kind, ha="center", va="center", fontsize=9)


def label_rows(axes, rows, bands, middles, scale):
    named = [row for row in rows if row.track.role in (STEP, WORKERS)]
    pitch = scale * min((row.height for row in named), default=1)
    every = max(1, round(0.17 / pitch + 0.49))
    shown = [row for row in named if not row.track.is_worker or row.track.number % every == 1 % every]
    places = [(row.top + row.height / 2, row.track.name) for row in shown]
    places += [((band.top + band.bottom) / 2, band.role) for band in bands]
    axes.set_yticks(*zip(*places), fontsize=min(11, max(9, 52 * pitch)))
    axes.tick_params(axis="y", length=0)
    for rank, y in middles.items():
        axes.annotate(f"rank {rank}", (0, y), xycoords=("axes fraction", "data"), xytext=(-78, 0),
                      textcoords="offset points", ha="right", va="center", fontweight="bold", rotation=90)


def mean_count(intervals, edges):
    """Mean number of these intervals that are under way, between each two neighbouring edges (array)."""
    import numpy

    def area(moments):  # integral of a count that goes up by one at each of the moments, up to the edges
        moments = numpy.sort(moments)
        sums = numpy.concatenate([[0.0], numpy.cumsum(moments)])
        passed = numpy.searchsorted(moments, edges)
        return passed * edges - sums[passed]

    count = area(numpy.array([i[0] for i in intervals])) - area(numpy.array([i[1] for i in intervals]))
    return numpy.diff(count) / numpy.diff(edges)


def draw_strip(axes, view, rank):
    import numpy

    edges = numpy.linspace(view.begin, view.end, 351)
    multiply = mean_count([(e.begin, e.end) for e in view.events(rank, "compute")], edges)
    move = mean_count(view.moving(rank), edges)
    axes.stairs(multiply, edges - view.begin, fill=True, color=STRIP_COLORS["multiply"])
    if view.blocks(rank):  # which do both at once
        axes.stairs(move, edges - view.begin, baseline=None, color=STRIP_COLORS["move"], linewidth=1.5)
    else:
        axes.stairs(multiply + move, edges - view.begin, baseline=multiply, fill=True, color=STRIP_COLORS["move"])
    workers = view.blocks(rank) or len(view.workers(rank))
    axes.set_ylim(0, workers)
    axes.set_yticks([workers], [str(workers)], va="top", fontsize=9)
    axes.set_ylabel(f"rank {rank}", rotation=0, ha="right", va="center", labelpad=12, fontweight="bold")
    axes.tick_params(axis="y", length=0)


def prepare_time_axis(axes):
    axes.tick_params(axis="x", labelbottom=False)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def label_time_axis(axes):
    axes.tick_params(axis="x", labelbottom=True)
    axes.set_xlabel("time (\u00b5s)")
    axes.xaxis.set_major_formatter("{x:,.0f}")


def place_legend(plt, figure, top, title, colors):
    """top: inches from the upper edge"""
    patches = [
        plt.Rectangle((0, 0), 1, 1, facecolor=color, linewidth=0, label=kind, hatch=HATCH if kind in WAITING else None)
        for kind, color in colors.items()
    ]
    corner = 1 - (RIGHT - 0.15) / WIDTH, 1 - top / figure.get_figheight()
    figure.legend(handles=patches, title=title, loc="upper left", bbox_to_anchor=corner, borderaxespad=0, frameon=False,
                  alignment="left", handlelength=1.6, title_fontproperties={"weight": "bold"})


def draw(plt, view, path):
    worker_colors, phase_colors = choose_colors(view)
    rows, bands, middles, total = place_rows(view)
    strips = [rank for rank in view.ranks if view.workers(rank)]
    rows_height = max(total, 0.25 * (len(worker_colors) + len(phase_colors)) + 0.9)  # the legends beside them
    strip_height = min(0.62, max(0.25, 6.0 / len(view.ranks)))
    height = TOP + rows_height + 2 * STRIP_GAP + len(strips) * (strip_height + STRIP_GAP) + BOTTOM
    figure = plt.figure(figsize=(WIDTH, height), dpi=100)

    def add_axes(top, tall, **others):
        place = LEFT / WIDTH, 1 - (top + tall) / height, (WIDTH - LEFT - RIGHT) / WIDTH, tall / height
        axes = figure.add_axes(place, **others)
        prepare_time_axis(axes)
        return axes

    axes = bottom = add_axes(TOP, rows_height)
    axes.set_xlim(0, view.end - view.begin)
    axes.set_ylim(total, 0)
    axes.set_title(f"{view.title}: {view.end - view.begin:,.0f} \u00b5s", loc="left", fontsize=14, fontweight="bold")
    draw_rows(axes, view, rows, {**worker_colors, **phase_colors})
    name_phases(axes, view, rows)
    label_rows(axes, rows, bands, middles, rows_height / total)
    who = "blocks" if bands else "workers"
    if worker_colors:
        place_legend(plt, figure, TOP, who, worker_colors)
    if phase_colors:
        above = 0.25 * len(worker_colors) + 0.45 if worker_colors else 0
        place_legend(plt, figure, TOP + above, "step", phase_colors)

    for i, rank in enumerate(strips):
        top = TOP + rows_height + 2 * STRIP_GAP + i * (strip_height + STRIP_GAP)
        bottom = add_axes(top, strip_height, sharex=axes)
        draw_strip(bottom, view, rank)
        if i == 0:
            place_legend(plt, figure, top, f"{who} that", STRIP_COLORS)
    label_time_axis(bottom)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        fail(path, f"cannot be written: {error}; name a .png, .pdf or .svg file in a folder that exists")
    print(f"drawn to {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE", help="trace that ./train --trace FILE wrote")
    parser.add_argument("-o", dest="picture", metavar="PICTURE", help="picture to write, .png, .pdf or .svg")
    parser.add_argument("--layer", type=int, help="one MoE layer (default with --pass: the first)")
    parser.add_argument("--pass", dest="direction", choices=["forward", "backward"],
                        help="which pass of it (default with --layer: forward)")
    parser.add_argument("--rank", type=int, help="this rank alone")
    options = parser.parse_args()
    plt = import_matplotlib() if options.picture else None
    view = choose_view(options)
    print_table(view)
    if plt:
        draw(plt, view, options.picture)


if __name__ == "__main__":
    main()
