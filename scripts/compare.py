#!/usr/bin/env python3
"""Compares what scripts/compare.sh has measured: one table, the same as JSON and as Markdown, and pictures.

    scripts/compare.py FOLDER          writes compare.md, compare.json and, where matplotlib is, compare.png there

A step counts once the warm-up is over; the last one is traced and does not count. Of each arm the steps of all blocks are
taken together: median and 90th percentile; tokens/s and MFU are those of the median step. Its losses must be the same
in all blocks, and what they differ by from those of the first arm is said.

Where a step goes is what the trace has of rank 0, a mean over the blocks: communication is the time in which the GPU's
queue stands for other ranks, in MoE layers (exchanges, barriers) or outside (sums of gradients, weights); what travels beside
computing is not seen. What moves rows inside the megakernel is a part of the kernel, of which a GPU runs one layer with
recording in that step (./train --trace). The MoE share counts the communication in MoE layers in. The head is the last
product with its loss, both passes; other: routers, dense FFNs, embedding.
"""

import csv
import datetime
import json
import os
import re
import sys

PARTS = ["attention", "MoE forward", "MoE backward", "communication in MoE", "other communication", "optimizer", "head",
         "other"]  # fmt: skip
PART_COLORS = ["#80b1d3", "#fdb462", "#e6550d", "#54278f", "#bcbddc", "#74c476", "#b3b3b3", "#d9d9d9"]
ARM_COLORS = ["#d7301f", "#0b4f9e", "#55b4ea", "#2ca25f", "#762a83", "#8c5a2b"]


def fail(place, message):
    print(f"compare.py: error: {place}: {message}", file=sys.stderr)
    sys.exit(2)


def read_text(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError as error:
        fail(path, f"cannot be read: {error.strerror}; measure again with scripts/compare.sh")


def quantile(values, part):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else None


# ---- one block ----


def read_steps(path):
    lines = [line for line in read_text(path).splitlines() if line.strip()]
    try:
        return [step for step in map(json.loads, lines) if "loss" in step and "seconds" in step]
    except ValueError as error:
        fail(path, f"found a line that is no JSON ({error}); measure again with scripts/compare.sh")


def part_of_phase(name):
    if name.startswith("attention"):
        return "attention"
    if name in ("moe forward", "moe backward"):
        return "MoE forward" if name == "moe forward" else "MoE backward"
    return {"update weights": "optimizer", "head": "head"}.get(name, "other")


def is_communication(name):
    return name.startswith("comm_") or name == "mok_barrier"


def read_parts(path):
    """Seconds of each part of the traced step of rank 0."""
    try:
        events = json.loads(read_text(path))["traceEvents"]
        own = [e for e in events if e.get("ph") == "X" and e["pid"] == 0 and e["cat"] in ("step", "operation")]
        spans = [(e["ts"], e["ts"] + e["dur"], e["name"], e["cat"]) for e in own]
    except (ValueError, KeyError, TypeError) as error:
        fail(path, f"found no trace ({error!r}); measure again with scripts/compare.sh")
    if not spans:
        fail(path, "found no events of rank 0; measure again with scripts/compare.sh")
    phases = [(begin, end, part_of_phase(name)) for begin, end, name, kind in spans if kind == "step"]
    phases = [phase for phase in phases if phase[2] != "other"]
    parts = dict.fromkeys(PARTS, 0.0)
    for begin, end, part in phases:
        parts[part] += end - begin
    for begin, end, name, kind in spans:
        if kind != "operation" or not is_communication(name):
            continue
        inside = next((part for first, last, part in phases if first <= begin and end <= last), None)
        if inside:
            parts[inside] -= end - begin
        parts["communication in MoE" if inside in PARTS[1:3] else "other communication"] += end - begin
    whole = max(end for _, end, _, _ in spans) - min(begin for begin, _, _, _ in spans)
    parts["other"] = whole - sum(parts.values())
    return {part: 1e-6 * time for part, time in parts.items()}


IDLE_MIB = 256  # more than a GPU holds that no program uses, and less than a program's context


def read_clocks(path, begin, end):
    """Means over the samples between two moments, of all GPUs that were at work."""
    if not os.path.exists(path):
        return {}
    rows = []
    for row in csv.reader(read_text(path).splitlines()):
        try:
            moment = datetime.datetime.strptime(row[0].strip(), "%Y/%m/%d %H:%M:%S.%f").timestamp()
            rows.append((moment, float(row[2]), float(row[3]), float(row[4])))
        except (ValueError, IndexError):
            continue
    rows = [row for row in rows if begin <= row[0] <= end and row[3] > IDLE_MIB]
    return {"mhz": mean(row[1] for row in rows), "watts": mean(row[2] for row in rows)} if rows else {}


def read_block(folder, warm):
    steps = read_steps(os.path.join(folder, "run", "log.jsonl"))
    timed = steps[warm:-1]
    if not timed:
        fail(folder, f"found {len(steps)} steps, wanted more than {warm + 1}; measure again with scripts/compare.sh")
    said = read_text(os.path.join(folder, "said"))
    memory = re.search(r"^memory: .*used ([0-9.]+) GiB", said, re.MULTILINE)
    device = re.search(r"^(\S+), on (.+)$", said, re.MULTILINE)
    layout = re.search(r"^(\d+ ranks?: .*), --moe", said, re.MULTILINE)
    clocks = read_clocks(os.path.join(folder, "gpus.csv"), timed[0]["unix_time"], timed[-1]["unix_time"])
    return {
        "arm": read_text(os.path.join(folder, "arm")).strip(),
        "flags": read_text(os.path.join(folder, "flags")).strip(),
        "preset": device.group(1) if device else "",
        "device": device.group(2) if device else "",
        "layout": layout.group(1) if layout else "",
        "losses": [step["loss"] for step in steps],
        "ms": [1e3 * step["seconds"] for step in timed],
        "tokens": timed[0]["tokens_per_second"] * timed[0]["seconds"],
        "flops_share": timed[0]["mfu_causal"] * timed[0]["seconds"],  # MFU of a step of one second
        "load": [step["load_max_over_mean"] for step in timed if "load_max_over_mean" in step],
        "memory_gib": float(memory.group(1)) if memory else None,
        "parts": read_parts(os.path.join(folder, "trace.json")),
        **clocks,
    }


# ---- all of them ----


def read_blocks(folder):
    warm = read_text(os.path.join(folder, "warm")).strip()
    if not warm.isdigit():
        fail(folder, f"found warm-up '{warm}', wanted a number; measure again with scripts/compare.sh")
    names = [name for name in os.listdir(folder) if re.fullmatch(r"block-\d+", name)]
    names.sort(key=lambda name: int(name[6:]))
    if not names:
        fail(folder, "found no blocks; measure with scripts/compare.sh")
    return [read_block(os.path.join(folder, name), int(warm)) for name in names]


def summarise(name, blocks):
    ms = [time for block in blocks for time in block["ms"]]
    parts = {part: mean(block["parts"][part] for block in blocks) for part in PARTS}
    step = sum(parts.values())
    moe = sum(parts[part] for part in PARTS[1:4])
    median = quantile(ms, 0.5)
    load = [value for block in blocks for value in block["load"]]
    memory = [block["memory_gib"] for block in blocks if block["memory_gib"]]
    return {
        "arm": name,
        "flags": blocks[0]["flags"],
        "steps": len(ms),
        "ms_median": median,
        "ms_p90": quantile(ms, 0.9),
        "ms_median_of_blocks": [quantile(block["ms"], 0.5) for block in blocks],
        "tokens_per_second": 1e3 * blocks[0]["tokens"] / median,
        "mfu": 1e3 * mean(block["flops_share"] for block in blocks) / median,
        "moe_share": moe / step,
        "ms_of_parts": {part: 1e3 * seconds for part, seconds in parts.items()},
        "memory_gib": max(memory) if memory else None,
        "last_loss": blocks[0]["losses"][-1],
        "load_max_over_mean": mean(load),
        "mhz": mean(block["mhz"] for block in blocks if "mhz" in block),
        "watts": mean(block["watts"] for block in blocks if "watts" in block),
        "losses": blocks[0]["losses"],
        "same_losses_in_all_blocks": all(block["losses"] == blocks[0]["losses"] for block in blocks),
        "ms": ms,
    }


def compare(folder):
    blocks = read_blocks(folder)
    names = list(dict.fromkeys(block["arm"] for block in blocks))
    arms = [summarise(name, [block for block in blocks if block["arm"] == name]) for name in names]
    first = arms[0]
    for arm in arms:
        pairs = list(zip(arm["losses"], first["losses"]))
        arm["loss_off_first"] = max(abs(a - b) / abs(b) for a, b in pairs)
        arm["gain_of_first"] = arm["ms_median"] / first["ms_median"]
        arm["limit_without_moe"] = 1 / (1 - arm["moe_share"])
    return {"device": blocks[0]["device"], "layout": blocks[0]["layout"], "preset": blocks[0]["preset"],
            "flags": read_text(os.path.join(folder, "flags")).strip(), "arms": arms}  # fmt: skip


# ---- the table ----


def text_of(value, form):
    return "-" if value is None else format(value, form)


HEAD = ["arm", "tokens/s", "ms/step", "p90", "MFU", "MoE share", "GiB", "last loss", "load max/mean", "MHz", "slower"]


def rows_of(result):
    for arm in result["arms"]:
        yield [arm["arm"], f"{arm['tokens_per_second']:.0f}", f"{arm['ms_median']:.1f}", f"{arm['ms_p90']:.1f}",
               f"{100 * arm['mfu']:.1f} %", f"{100 * arm['moe_share']:.1f} %", text_of(arm["memory_gib"], ".1f"),
               f"{arm['last_loss']:.4f}", text_of(arm["load_max_over_mean"], ".2f"), text_of(arm["mhz"], ".0f"),
               f"{arm['gain_of_first']:.3f} x"]  # fmt: skip


def parts_rows(result):
    for arm in result["arms"]:
        times = arm["ms_of_parts"]
        yield [arm["arm"], *(f"{times[part]:.1f}" for part in PARTS), f"{sum(times.values()):.1f}"]


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


DISTURBED = 1.25  # times the median


def notes(result):
    first = result["arms"][0]
    for arm in result["arms"]:
        slow = sum(time > DISTURBED * arm["ms_median"] for time in arm["ms"])
        if slow:
            yield (f"{arm['arm']}: {slow} of {arm['steps']} steps took over {DISTURBED} times the median "
                   f"(medians of its blocks: {', '.join(f'{ms:.1f}' for ms in arm['ms_median_of_blocks'])} ms). "
                   "Something else may have run there.")  # fmt: skip
        if not arm["same_losses_in_all_blocks"]:
            yield f"{arm['arm']}: its blocks have different losses, so its runs are not the same bits."
        if arm is first:
            continue
        off = arm["loss_off_first"]
        yield (f"{first['arm']} against {arm['arm']}: {arm['gain_of_first']:.3f} times the tokens/s. "
               f"Without its MoE layers {arm['arm']} would be {arm['limit_without_moe']:.2f} times as fast: the most that any "
               f"MoE layer can gain over it. Losses are {'the same' if off == 0 else f'at most {off:.1e} apart, relative'}"
               f" in {len(arm['losses'])} steps.")  # fmt: skip


def is_cpu(result):
    return "CPU" in result["device"]


def markdown(result):
    blocks = len(result["arms"][0]["ms_median_of_blocks"])
    lines = [f"{result['preset']}, {result['layout']}, {result['device']}; flags: `{result['flags']}`", "",
             f"{result['arms'][0]['steps']} timed steps of each arm, in {blocks} blocks by turns:", "",
             table(HEAD, rows_of(result)), "",
             "Where a step goes, ms of rank 0 (one traced step of each block):", "",
             table(["arm", *PARTS, "step"], parts_rows(result)), "", *notes(result)]  # fmt: skip
    if is_cpu(result):
        lines += ["", "These are CPU ranks: they show that the comparison works. Of the speed of GPUs they say nothing."]
    return "\n".join(lines) + "\n"


# ---- pictures ----


def draw_losses(axes, difference, arms):
    for i, arm in enumerate(arms):
        steps = range(1, len(arm["losses"]) + 1)
        axes.plot(steps, arm["losses"], color=ARM_COLORS[i % 6], lw=3.2 - 0.8 * i, label=arm["arm"], alpha=0.85)
        off = [(a - b) / abs(b) for a, b in zip(arm["losses"], arms[0]["losses"])]
        if i > 0:
            difference.plot(steps, off, color=ARM_COLORS[i % 6], lw=1.2)
    axes.set_ylabel("loss, nats per token")
    axes.set_title("Loss", fontsize=11)
    axes.legend(frameon=False, fontsize=9)
    axes.tick_params(labelbottom=False)
    difference.axhline(0, color=ARM_COLORS[0], lw=1)
    difference.set_ylabel(f"off {arms[0]['arm']}", fontsize=9)
    difference.set_xlabel("step")
    if not any(arm["loss_off_first"] for arm in arms):
        difference.set_ylim(-1e-3, 1e-3)
        difference.text(0.5, 0.72, "the same in all steps", transform=difference.transAxes, ha="center", fontsize=9)
    difference.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))


def draw_times(axes, arms):
    for i, arm in enumerate(arms):
        ordered = sorted(arm["ms"])
        shares = [(place + 1) / len(ordered) for place in range(len(ordered))]
        axes.step(ordered, shares, where="post", color=ARM_COLORS[i % 6], lw=1.8)
        axes.plot([arm["ms_median"]], [0.5], "o", color=ARM_COLORS[i % 6], ms=6,
                  label=f"{arm['arm']}: {arm['ms_median']:.1f} ms")  # fmt: skip
    axes.set_xlabel("milliseconds of a step")
    axes.set_ylabel("share of steps that took no longer")
    axes.set_title("Step time", fontsize=11)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(0, -0.14), ncols=2)  # no curve is there
    # A straggler or two may not press all others together.
    times = [time for arm in arms for time in arm["ms"]]
    low, high = min(times), quantile(times, 0.98)
    axes.set_xlim(low - 0.05 * (high - low), high + 0.3 * (high - low) + 1e-9)
    axes.set_ylim(0, 1.02)


def draw_parts(axes, arms):
    places = range(len(arms))
    below = [0.0] * len(arms)
    for part, color in zip(PARTS, PART_COLORS):
        times = [max(arm["ms_of_parts"][part], 0) for arm in arms]
        if max(times) < 1e-3 * max(sum(arm["ms_of_parts"].values()) for arm in arms):
            continue
        axes.bar(places, times, bottom=below, color=color, width=0.62, label=part, edgecolor="white", lw=0.6)
        for place, time in enumerate(times):
            if time > 0.035 * sum(arms[place]["ms_of_parts"].values()):
                axes.text(place, below[place] + time / 2, f"{time:.1f}", ha="center", va="center", fontsize=8,
                          color="white" if part == "communication in MoE" else "black")  # fmt: skip
        below = [base + time for base, time in zip(below, times)]
    for place, height in enumerate(below):
        step = sum(arms[place]["ms_of_parts"].values())
        axes.text(place, height, f"{step:.1f}", ha="center", va="bottom", fontsize=9, fontweight="bold")
    axes.set_xticks(list(places), [arm["arm"] for arm in arms])
    axes.set_xlim(-0.6, len(arms) - 0.4)
    axes.set_ylim(0, 1.07 * max(below))
    axes.set_ylabel("milliseconds of rank 0")
    axes.set_title("Where a step goes", fontsize=11)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))


def draw(result, path):
    try:
        import matplotlib
    except ImportError:
        print("compare.py: python3 has no matplotlib: no picture")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(15, 5), layout="constrained")
    grid = figure.add_gridspec(2, 3, height_ratios=(3, 1), width_ratios=(1, 1, 1.3))
    loss = figure.add_subplot(grid[0, 0])
    draw_losses(loss, figure.add_subplot(grid[1, 0], sharex=loss), result["arms"])
    draw_times(figure.add_subplot(grid[:, 1]), result["arms"])
    draw_parts(figure.add_subplot(grid[:, 2]), result["arms"])
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    demonstration = "  (a demonstration: CPU ranks say nothing of the speed of GPUs)" if is_cpu(result) else ""
    figure.suptitle(f"{result['preset']}, {result['layout']}, {result['device']}{demonstration}", fontsize=12)
    figure.savefig(path, dpi=120)


def write(path, text):
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        fail(path, f"cannot be written: {error.strerror}; free some space there")


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__.strip())
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
    folder = sys.argv[1]
    result = compare(folder)
    text = markdown(result)
    write(os.path.join(folder, "compare.json"), json.dumps(result, indent=1) + "\n")
    write(os.path.join(folder, "compare.md"), text)
    draw(result, os.path.join(folder, "compare.png"))
    print(text, end="")


if __name__ == "__main__":
    main()
