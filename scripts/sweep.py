#!/usr/bin/env python3
"""Tries settings of the megakernel: each beside the default ones, by turns in one process of tests/bench_layer.c.

    scripts/sweep.py build/cuda/tests/bench_layer --ranks 2 --shape moonlight --shape qwen3-30b
    scripts/sweep.py build/cuda/tests/bench_layer --with comm-workers=6 --with minibatch-rows=2048,comm-workers=8

Settings are the trainer's flags. Without --with: 2, 4, 8 and 16 workers that only move rows; half, two and four times the
default minibatch; a quarter, half and two times the default ring, in whole minibatches, so that these stay as they are.
What the default ones are for a shape, these ranks and this device, a first short run tells.

A number is the median in ms, and behind it percent of the default settings' in the same run: below 100 is faster. A ring
of two times the default one changes nothing where that holds all rows (W0): how far it is from 100 is noise.

Exit code 2: something is missing, or cannot be.
"""

import argparse
import os
import tempfile

from bench_layer import PASSES, add_rows, fail, number_from, program_command, run_program

BLOCK_ROWS, MOST_WITH = 128, 16
MEASURES = ["forward", "backward", "fwd+bwd"]
DEFAULT = "mok"
DEFAULT_SHAPES = ["moonlight", "qwen3-30b"]


def run(options, flags):
    """The rows of a run of the megakernel alone."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*program_command(options), "--arms", DEFAULT, "--workload", options.workload, "--backward", *flags]
        rows, notes = run_program(words, os.path.join(folder, "rows.json"))
    if not rows:
        fail(options.beside, (notes or ["found no rows of the megakernel, wanted some"])[-1])
    return rows


def find_defaults(options):
    """Name of a shape -> a row with its default settings."""
    shapes = [word for shape in options.shape or DEFAULT_SHAPES for word in ("--shape", shape)]
    return {row["shape"]: row for row in run(options, [*shapes, "--load", "burst", "--iterations", "1"])}


def multiples_near(number, factors, unit):
    """Each product with a factor, in whole units: those that differ from the number and each other."""
    found = [max(1, round(number * factor / unit)) * unit for factor in factors]
    return [n for n in dict.fromkeys(found) if n != number]


def settings_around(default):
    minibatch = default["minibatch_rows"]
    movers = [n for n in (2, 4, 8, 16) if n < default["workers"]]
    minibatches = multiples_near(minibatch, (0.5, 2, 4), BLOCK_ROWS)
    rings = multiples_near(default["ring_rows"], (0.25, 0.5, 2), minibatch)
    return ([f"comm-workers={n}" for n in movers] + [f"minibatch-rows={n}" for n in minibatches]
            + [f"ring-rows={n}" for n in rings])  # fmt: skip


def measure(options, shape, default):
    flags = ["--shape", shape, "--iterations", str(options.iterations)]
    for load in options.load:
        flags += ["--load", load]
    for settings in options.settings or settings_around(default):
        flags += ["--with", settings]
    return run(options, flags)


def print_table(options, shape, default, rows):
    of = {(row["arm"], row["load"], row["pass"]): row["ms"] for row in rows}
    names = list(dict.fromkeys(row["arm"] for row in rows))
    shown = [name.removeprefix(f"{DEFAULT} ") if name != DEFAULT else "default" for name in names]
    width = max(map(len, shown))
    print(f"\n{shape}, {default['workload']}, {default['EP']} ranks, default: workers={default['workers']},"
          f"minibatch-rows={default['minibatch_rows']},ring-rows={default['ring_rows']}")  # fmt: skip
    print(" " * width + "".join(f"   {load:<{16 * len(MEASURES)}}" for load in options.load).rstrip())
    columns = "".join(f" {measure:>8} {'%':>6}" for measure in MEASURES)
    print(("settings".ljust(width) + f"  {columns} " * len(options.load)).rstrip())
    for name, settings in zip(names, shown):
        line = settings.ljust(width)
        for load in options.load:
            line += "  "
            for measure in MEASURES:
                ms = of[name, load, measure]
                line += f" {ms:8.4f} {100 * ms / of[DEFAULT, load, measure]:6.1f}"
            line += " "
        print(line.rstrip(), flush=True)


def read_flags():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)  # fmt: skip
    add = parser.add_argument
    add("beside", metavar="PROGRAM", help="build/cuda/tests/bench_layer")
    add("--ranks", type=number_from(1), default=1, metavar="N")
    add("--shape", action="append", metavar="NAME", help="see bench_layer --help; may be repeated")
    add("--workload", default="W0", metavar="W0", help="one of them")
    add("--with", action="append", dest="settings", metavar="SETTINGS", help="these alone; may be repeated")
    add("--iterations", type=number_from(1), default=100, metavar="N",
        help="passes that are timed of each settings and load, at least (100)")  # fmt: skip
    add("--load", action="append", choices=list(PASSES), help="default: both")
    add("--json", metavar="FILE", help="adds every row to a file as a line of JSON")
    options = parser.parse_args()
    options.load = [load for load in PASSES if load in (options.load or PASSES)]
    if options.workload == "all":
        fail("--workload", "found all, wanted one of W0 to W7")
    if len(options.settings or []) > MOST_WITH:
        fail("--with", f"found {len(options.settings)}, wanted at most {MOST_WITH}")
    return options


def main():
    options = read_flags()
    for shape, default in find_defaults(options).items():
        rows = measure(options, shape, default)
        print_table(options, shape, default, rows)
        add_rows(options.json, rows)


if __name__ == "__main__":
    main()
