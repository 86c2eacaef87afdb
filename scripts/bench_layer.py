#!/usr/bin/env python3
"""Times the MoE layer as a user of torch would write it, as tests/bench_layer.c times ours.

    scripts/bench_layer.py                                             torch alone, on one GPU
    torchrun --nproc-per-node 2 scripts/bench_layer.py                 on two: an EP group, exchanges by NCCL
    scripts/bench_layer.py --beside build/cuda/tests/bench_layer       both by turns, in one table
    scripts/bench_layer.py --beside build/cuda/tests/bench_layer --ranks 2

The layer: counts are exchanged and read by the host, rows sorted by expert go to their ranks by all_to_all_single, are
sorted again by local expert, meet torch._grouped_mm, silu(gate) * up and torch._grouped_mm, and come back the same way;
the gates weigh a token's results in one batched product. Orders are undone by gathers, in the backward pass too. Beside
it the grouped products alone. Rows are as bench_layer prints them, and so is what a burst, sustained and each pass are.

Autograd leaves weights' gradients in BF16; ours are sums in FP32. So backward goes on until they are in FP32 buffers, as
trainers keep them: copied there (backward, fwd+bwd) or added to what is there (backward-add). backward-bf16 and
fwd+bwd-bf16 are the time until autograd is done, which is less work than ours. Products alone end with BF16.

With --beside each shape is measured in the order ours, torch, torch, ours, half of the passes in each run, and the table
has means of the two medians; a ratio above 1 says that ours is faster, the last one than torch to BF16. The layer's clock
begins when ids and gates are there. Only W0, balanced routes; with --beside ours runs alone in other workloads.

Exit code 2: something is missing. Needs torch 2.8 or later, and a GPU for each rank.
"""

import argparse
import ctypes
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time

# name: T, H, I, E, K, S
SHAPES = {
    "moonlight": (8192, 2048, 1408, 64, 6, 1408),
    "moonlight-routed": (8192, 2048, 1408, 64, 6, 0),
    "qwen3-30b": (8192, 2048, 768, 128, 8, 768),
    "dsv3": (4096, 7168, 2048, 256, 8, 2048),
    "qwen3.5": (8192, 4096, 1024, 512, 10, 1024),
    "small": (16384, 1024, 512, 64, 8, 512),
}
DEFAULT_SHAPES = ["moonlight", "moonlight-routed", "qwen3-30b"]
SIZES = ["T", "H", "I", "E", "K", "S"]
MEASURES = ["forward", "backward", "backward-bf16", "backward-add", "fwd+bwd", "fwd+bwd-bf16",
            "gate-up", "down", "both", "d-hidden", "d-x", "d-w2", "d-w13", "four"]  # fmt: skip
WHOLE = ["forward", "backward", "backward-add", "fwd+bwd", "both", "four"]  # none is a part of another in one pass
PASSES_OF_LAYER = ["backward", "backward-add", "fwd+bwd"]  # what a pass of the layer measures beside forward, by turns
WORKLOADS = [f"W{i}" for i in range(8)] + ["all"]
PASSES = {"burst": 4, "sustained": 10}  # of a turn

SETS, WARM_PASSES, IDLE_SECONDS, LOAD_SECONDS = 3, len(PASSES_OF_LAYER), 0.06, 0.1
GROUP_ROWS = 8  # torch._grouped_mm sums over rows of a group in 16-byte steps: of weight gradients
FLOPS_OF_A_CYCLE = 4096  # dense BF16, of a multiprocessor (Hopper)


def fail(place, message):
    print(f"{os.path.basename(sys.argv[0])}: error: {place}: {message}", file=sys.stderr)
    sys.exit(2)


def import_torch():
    try:
        import torch
    except ImportError as error:
        fail(error.name or "torch", "found none, wanted torch 2.8 or later; python3 -m pip install torch")
    if not torch.cuda.is_available():
        fail("torch", "found no GPU, wanted one; nvidia-smi lists them, and torch must be a build for CUDA")
    if not hasattr(torch, "_grouped_mm"):
        fail("torch", f"found {torch.__version__} without _grouped_mm, wanted 2.8 or later")
    return torch


# ---- the clock of the multiprocessors, by NVML where it is ----


class Clock:
    def __init__(self, torch):
        self.nvml, self.device = None, ctypes.c_void_p()
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
            uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()
            if nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self.device)) == 0:
                self.nvml = nvml
        except (OSError, AttributeError):
            pass

    def read(self):
        """MHz; None: not known."""
        multiprocessors, mhz = 1, ctypes.c_uint()
        if self.nvml and self.nvml.nvmlDeviceGetClockInfo(self.device, multiprocessors, ctypes.byref(mhz)) == 0:
            return mhz.value
        return None


# ---- ranks ----


class Group:
    """The EP group: one rank, or those that torchrun started."""

    def __init__(self, torch):
        self.torch, self.ranks = torch, int(os.environ.get("WORLD_SIZE", "1"))
        self.rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            fail("--nproc-per-node", f"found no GPU for local rank {local}, wanted one for each; start fewer")
        torch.cuda.set_device(local)
        torch.manual_seed(1 + self.rank)
        if self.ranks > 1:
            torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", local))
        self.meeting = torch.zeros(1, device="cuda")

    def meet(self):
        """Until all ranks' devices are here; the host goes on."""
        if self.ranks > 1:
            self.torch.distributed.all_reduce(self.meeting)

    def slowest(self, numbers):
        """Each becomes its most over the ranks."""
        if self.ranks == 1:
            return numbers
        most = self.torch.tensor(numbers, dtype=self.torch.float64, device="cuda")
        self.torch.distributed.all_reduce(most, op=self.torch.distributed.ReduceOp.MAX)
        return most.tolist()

    def close(self):
        if self.ranks > 1:
            self.torch.distributed.destroy_process_group()


def make_functions(torch):
    """Dispatch, permutation and exchange with gradients that are made of gathers and exchanges too."""

    class Dispatch(torch.autograd.Function):
        """Row i is x[order[i] // K]; inverse is that of order."""

        @staticmethod
        def forward(ctx, x, order, inverse, top_k):
            ctx.save_for_backward(inverse)
            ctx.top_k = top_k
            return x.index_select(0, order // top_k)

        @staticmethod
        def backward(ctx, d_rows):
            (inverse,) = ctx.saved_tensors
            d_slots = d_rows.index_select(0, inverse)
            return d_slots.view(-1, ctx.top_k, d_slots.shape[1]).sum(1), None, None, None

    class Permute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows, index, inverse):
            ctx.save_for_backward(inverse)
            return rows.index_select(0, index)

        @staticmethod
        def backward(ctx, d_rows):
            return d_rows.index_select(0, ctx.saved_tensors[0]), None, None

    def exchange_rows(rows, arrive, send):
        out = rows.new_empty(sum(arrive), rows.shape[1])
        torch.distributed.all_to_all_single(out, rows.contiguous(), arrive, send)
        return out

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows, arrive, send):
            ctx.arrive, ctx.send = arrive, send
            return exchange_rows(rows, arrive, send)

        @staticmethod
        def backward(ctx, d_rows):
            return exchange_rows(d_rows, ctx.send, ctx.arrive), None, None

    return Dispatch.apply, Permute.apply, Exchange.apply


# ---- the arms ----


class Layer:
    """The MoE layer on this rank."""

    def __init__(self, group, shape, backward):
        torch, (T, H, I, E, K, S) = group.torch, shape
        self.torch, self.group, self.shape, self.backward = torch, group, shape, backward
        self.name = "torch-nccl" if group.ranks > 1 else "torch"
        self.dispatch, self.permute, self.exchange = make_functions(torch)
        local = E // group.ranks

        def make(*sizes, scale=1.0):
            x = torch.randn(*sizes, device="cuda", dtype=torch.bfloat16).mul_(scale)
            return x.requires_grad_(backward)

        scale = 1 / math.sqrt(H)
        self.w13, self.w2 = make(local, 2 * I, H, scale=scale), make(local, H, I, scale=scale)
        self.shared_w13 = make(2 * S, H, scale=scale) if S else None
        self.shared_w2 = make(H, S, scale=scale) if S else None
        self.weights = [w for w in (self.w13, self.w2, self.shared_w13, self.shared_w2) if w is not None]
        self.main_grads = [torch.zeros_like(w, dtype=torch.float32) for w in self.weights if backward]
        self.passes = 0
        self.local_of_arrival = torch.arange(local, device="cuda").repeat(group.ranks)
        self.sets = []
        for step in range(SETS):
            gates = torch.rand(T, K, device="cuda").requires_grad_(backward)
            dy = make(T, H).detach() if backward else None
            self.sets.append((make(T, H), self.balanced_ids(step), gates, dy))
        self.check_counts()

    def balanced_ids(self, step):
        """Routes, counted from the group's first one, take the experts in turn, in a random order."""
        torch, (T, _, _, E, K, _) = self.torch, self.shape
        experts = list(range(E))
        random.Random(step).shuffle(experts)
        first = self.group.rank * T
        route = torch.arange(first * K, (first + T) * K, device="cuda") % E
        return torch.tensor(experts, device="cuda")[route].view(T, K)

    def expert_counts(self, ids):
        """Rows of this rank's experts, of all ranks' tokens."""
        counts = self.torch.bincount(ids.flatten(), minlength=self.shape[3])
        if self.group.ranks > 1:
            self.torch.distributed.all_reduce(counts)
        local = len(self.local_of_arrival) // self.group.ranks
        return counts[self.group.rank * local : (self.group.rank + 1) * local]

    def check_counts(self):
        if not self.backward:
            return
        for _, ids, _, _ in self.sets:
            if any(count % GROUP_ROWS for count in self.expert_counts(ids).tolist()):
                fail("--shape", f"found experts whose rows are no multiple of {GROUP_ROWS}, which torch._grouped_mm "
                                "needs for weight gradients; choose T a multiple of E")  # fmt: skip

    def experts(self, rows, ends):
        torch = self.torch
        gate_up = torch._grouped_mm(rows, self.w13.transpose(-2, -1), offs=ends)
        gate, up = gate_up.chunk(2, dim=-1)
        return torch._grouped_mm(torch.nn.functional.silu(gate) * up, self.w2.transpose(-2, -1), offs=ends)

    def experts_of_all(self, rows, counts):
        """rows in order of expert, counts of them; the results in the same order."""
        torch, ranks = self.torch, self.group.ranks
        arriving = torch.empty_like(counts)
        torch.distributed.all_to_all_single(arriving, counts)
        send, arrive = torch.stack((counts, arriving)).view(2, ranks, -1).sum(2).tolist()  # the host waits once
        arrived = self.exchange(rows, arrive, send)
        order = torch.argsort(self.local_of_arrival.repeat_interleave(arriving, output_size=sum(arrive)), stable=True)
        inverse = self.invert(order)
        ends = arriving.view(ranks, -1).sum(0).cumsum(0).to(torch.int32)
        out = self.experts(self.permute(arrived, order, inverse), ends)
        return self.exchange(self.permute(out, inverse, order), send, arrive)

    def invert(self, order):
        inverse = self.torch.empty_like(order)
        inverse[order] = self.torch.arange(len(order), device="cuda")
        return inverse

    def forward(self, x, ids, gates):
        torch, (T, H, _, E, K, S) = self.torch, self.shape
        flat = ids.flatten()
        order = torch.argsort(flat, stable=True)
        inverse = self.invert(order)
        counts = torch.bincount(flat, minlength=E)
        rows = self.dispatch(x, order, inverse, K)
        if self.group.ranks > 1:
            out = self.experts_of_all(rows, counts)
        else:
            out = self.experts(rows, counts.cumsum(0).to(torch.int32))
        slots = self.permute(out, inverse, order).view(T, K, H)
        y = torch.bmm(gates.to(x.dtype).unsqueeze(1), slots).squeeze(1)
        if S:
            gate, up = torch.nn.functional.linear(x, self.shared_w13).chunk(2, dim=-1)
            y = y + torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, self.shared_w2)
        return y

    def keep_gradients(self, grads, add):
        with self.torch.no_grad():
            for main, grad in zip(self.main_grads, grads):
                if add:
                    main.add_(grad)
                else:
                    main.copy_(grad)

    def run(self, number, mark):
        """Marks around what this pass measures."""
        torch = self.torch
        x, ids, gates, dy = self.sets[number % SETS]
        measure = PASSES_OF_LAYER[self.passes % len(PASSES_OF_LAYER)] if self.backward else None
        joined = measure == "fwd+bwd"
        self.passes += 1
        marks = {}
        self.group.meet()
        begin = mark()
        with torch.set_grad_enabled(self.backward):
            y = self.forward(x, ids, gates)
        if not joined:
            marks["forward"] = begin, mark()
        if not self.backward:
            return marks
        if not joined:
            self.group.meet()
            begin = mark()
        _, _, *grads = torch.autograd.grad(y, [x, gates, *self.weights], dy)
        if measure != "backward-add":
            marks[f"{measure}-bf16"] = begin, mark()
        self.keep_gradients(grads, measure == "backward-add")
        marks[measure] = begin, mark()
        return marks

    def flops(self, measure):
        T, H, I, _, K, S = self.shape
        passes = {"forward": 1, "backward": 2, "fwd+bwd": 3}[measure.removesuffix("-bf16").removesuffix("-add")]
        return 6.0 * T * H * (K * I + S) * passes


class Products:
    """The grouped products of the layer alone."""

    name = "torch-grouped-mm"

    def __init__(self, layer):
        torch, (_, H, I, _, _, _) = layer.torch, layer.shape
        self.torch, self.layer = torch, layer
        counts = [layer.expert_counts(ids) for _, ids, _, _ in layer.sets]
        self.ends = [count.cumsum(0).to(torch.int32) for count in counts]
        self.rows_of_set = [int(end[-1]) for end in self.ends]
        most = max(self.rows_of_set)
        self.rows = torch.randn(most, H, device="cuda", dtype=torch.bfloat16)
        self.hidden = torch.randn(most, I, device="cuda", dtype=torch.bfloat16)
        if layer.backward:
            self.dy = torch.randn(most, H, device="cuda", dtype=torch.bfloat16)
            self.d_gate_up = torch.randn(most, 2 * I, device="cuda", dtype=torch.bfloat16)

    def run(self, number, mark):
        torch, layer, number = self.torch, self.layer, number % SETS
        rows, ends = self.rows_of_set[number], self.ends[number]
        layer.group.meet()
        with torch.no_grad():
            begin = mark()
            torch._grouped_mm(self.rows[:rows], layer.w13.transpose(-2, -1), offs=ends)
            middle = mark()
            torch._grouped_mm(self.hidden[:rows], layer.w2.transpose(-2, -1), offs=ends)
            end = mark()
        marks = {"gate-up": (begin, middle), "down": (middle, end), "both": (begin, end)}
        return {**marks, **self.run_backward(rows, ends, mark)} if layer.backward else marks

    def run_backward(self, rows, ends, mark):
        torch, layer = self.torch, self.layer
        x, hidden, dy, d_gate_up = self.rows[:rows], self.hidden[:rows], self.dy[:rows], self.d_gate_up[:rows]
        layer.group.meet()
        with torch.no_grad():
            at = [mark()]
            for left, right in ((dy, layer.w2), (d_gate_up, layer.w13), (dy.t(), hidden), (d_gate_up.t(), x)):
                torch._grouped_mm(left, right, offs=ends)
                at.append(mark())
        marks = dict(zip(("d-hidden", "d-x", "d-w2", "d-w13"), zip(at, at[1:])))
        return {**marks, "four": (at[0], at[-1])}

    def flops(self, measure):
        _, H, I, _, _, _ = self.layer.shape
        products = {"gate-up": 2, "down": 1, "both": 3, "d-hidden": 1, "d-x": 2, "d-w2": 1, "d-w13": 2, "four": 6}
        return 2.0 * H * I * sum(self.rows_of_set) / SETS * products[measure]


# ---- timing ----


class Timer:
    def __init__(self, group):
        self.torch, self.group, self.clock, self.number = group.torch, group, Clock(group.torch), 0

    def mark(self):
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def untimed(self, arm, count):
        for _ in range(count):
            arm.run(self.number, lambda: None)
            self.number += 1

    def timed(self, arm, count):
        """Passes of measure -> ms of the slowest rank, and MHz."""
        passes = []
        for _ in range(count):
            passes.append(arm.run(self.number, self.mark))
            self.number += 1
        list(passes[count // 2].values())[0][1].synchronize()
        mhz = self.clock.read()
        self.torch.cuda.synchronize()
        times = [begin.elapsed_time(end) for marks in passes for begin, end in marks.values()]
        slowest = iter(self.group.slowest(times))
        return [{measure: next(slowest) for measure in marks} for marks in passes], mhz

    def warm_up(self, arm):
        """Seconds of a pass, about."""
        self.untimed(arm, WARM_PASSES)
        passes, _ = self.timed(arm, WARM_PASSES)
        ms = sum(times.get(measure, 0) for times in passes for measure in WHOLE)
        return 1e-3 * max(ms / len(passes), 1e-3)

    def turn(self, arm, load, seconds):
        self.torch.cuda.synchronize()
        if self.group.ranks > 1:
            self.torch.distributed.barrier()
        if load == "burst":
            time.sleep(IDLE_SECONDS)
        self.untimed(arm, 1 if load == "burst" else 1 + int(LOAD_SECONDS / seconds))
        return self.timed(arm, PASSES[load])

    def measure(self, arms, loads, iterations):
        """(arm, load) -> passes of measure -> ms, clocks. Arms by turns A/B/B/A."""
        seconds = [self.warm_up(arm) for arm in arms]
        found = {(arm.name, load): ([], []) for arm in arms for load in loads}
        for load in loads:
            order = list(zip(arms, seconds))
            for _ in range(-(-iterations // (2 * PASSES[load]))):
                for arm, each in order + order[::-1]:
                    times, mhz = self.turn(arm, load, each)
                    found[arm.name, load][0].extend(times)
                    found[arm.name, load][1].extend([mhz] if mhz else [])
        return found


# ---- rows of the table, as bench_layer has them ----


def print_head():
    print(f"{'T':>6} {'H':>5} {'I':>5} {'E':>4} {'K':>3} {'S':>5} {'EP':>3} {'work':<4} {'busiest':>7} {'arm':<27} "
          f"{'pass':<13} {'load':<9} {'ms':>9} {'p10':>9} {'p90':>9} {'TFLOP/s':>8} {'MHz':>5} {'of MHz':>7}")  # fmt: skip


def sizes_text(row):
    return (f"{row['T']:6} {row['H']:5} {row['I']:5} {row['E']:4} {row['K']:3} {row['S']:5} {row['EP']:3} "
            f"{row['workload']:<4} {row['busiest']:7.3f} {row['arm']:<27} {row['pass']:<13} {row['load']:<9}")  # fmt: skip


def print_row(row, peak_of_a_megahertz):
    mhz = row.get("mhz")
    share = f"{100e12 * row['tflops'] / (peak_of_a_megahertz * mhz):6.1f}%" if mhz else f"{'-':>7}"
    print(f"{sizes_text(row)} {row['ms']:9.4f} {row['p10']:9.4f} {row['p90']:9.4f} {row['tflops']:8.1f} "
          f"{f'{mhz:.0f}' if mhz else '-':>5} {share}", flush=True)  # fmt: skip


def make_row(torch, group, name, arm, measure, load, passes, clocks):
    times = sorted(times[measure] for times in passes if measure in times)
    count, shape = len(times), (arm.layer if isinstance(arm, Products) else arm).shape
    ms = times[count // 2]
    row = {"device": torch.cuda.get_device_name(), "shape": name, **dict(zip(SIZES, shape)), "EP": group.ranks,
           "workload": "W0", "busiest": 1.0, "arm": arm.name, "pass": measure, "load": load, "ms": ms,
           "p10": times[count // 10], "p90": times[count - 1 - count // 10], "tflops": 1e-9 * arm.flops(measure) / ms,
           "passes": count}  # fmt: skip
    if clocks:
        row["mhz"] = sum(clocks) / len(clocks)
    return row


def add_rows(path, rows):
    if not path:
        return
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    except OSError as error:
        fail("--json", f"cannot add to {path}: {error.strerror}; name a file in a folder that can be written")


def bench_shape(group, name, shape, options):
    torch = group.torch
    layer = Layer(group, shape, options.backward)
    arms = [layer, Products(layer)]
    found = Timer(group).measure(arms, options.load, options.iterations)
    if group.rank:
        return
    properties, rows = torch.cuda.get_device_properties(torch.cuda.current_device()), []
    print(f"\n{name}, W0")
    print_head()
    for load in options.load:
        for measure in MEASURES:
            for arm in arms:
                passes, clocks = found[arm.name, load]
                if any(measure in times for times in passes):
                    rows.append(make_row(torch, group, name, arm, measure, load, passes, clocks))
                    print_row(rows[-1], FLOPS_OF_A_CYCLE * 1e6 * properties.multi_processor_count)
    add_rows(options.json, rows)


def bench_torch(options, shapes):
    torch = import_torch()
    group = Group(torch)
    for name, shape in shapes:
        if shape[3] % group.ranks:
            fail("--shape", f"found {shape[3]} experts for {group.ranks} ranks, wanted a multiple of the ranks")
    if group.rank == 0:
        print(f"{torch.cuda.get_device_name()}, {group.ranks} ranks, torch {torch.__version__}, "
              f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")  # fmt: skip
    for name, shape in shapes:
        bench_shape(group, name, shape, options)
        torch.cuda.empty_cache()
    group.close()


# ---- both by turns ----


def run_program(words, path):
    """The rows that it adds to the file, and what it says of arms."""
    try:
        done = subprocess.run([*words, "--json", path], capture_output=True, text=True, errors="replace")
    except OSError as error:
        fail(words[0], f"cannot be run: {error.strerror}")
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["nothing"]
        ours = [line for line in said if "error: " in line]
        fail(" ".join(words), f"ended with exit code {done.returncode}: {(ours or said)[0]}")
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    os.remove(path)
    notes = [line for line in done.stdout.splitlines() if line[:1].isalpha() and ": " in line]
    return [row for row in rows if "part" not in row], notes


def mean_rows(runs):
    """(arm, pass, load) -> a row with means of several runs."""
    rows = {}
    for row in (row for run in runs for row in run):
        rows.setdefault((row["arm"], row["pass"], row["load"]), []).append(row)
    means = {}
    for key, same in rows.items():
        ms = sum(row["ms"] for row in same) / len(same)
        clocks = [row["mhz"] for row in same if "mhz" in row]
        tflops = same[0]["tflops"] * same[0]["ms"] / ms
        means[key] = {**same[0], "ms": ms, "tflops": tflops, "mhz": sum(clocks) / len(clocks) if clocks else None}
    return means


def cells(row):
    return f" {row['ms']:9.4f} {row['tflops']:8.1f} {f'''{row['mhz']:.0f}''' if row['mhz'] else '-':>5}"


def print_beside(ours, torch):
    of_pass = {(measure, load): row for (_, measure, load), row in torch.items()}
    columns, bf16_columns = f" {'ms':>9} {'TFLOP/s':>8} {'MHz':>5}", f"   bf16: {'ms':>9}   ratio"
    any_bf16 = any(measure.endswith("-bf16") for measure, _ in of_pass)
    print(f"{'T':>6} {'H':>5} {'I':>5} {'E':>4} {'K':>3} {'S':>5} {'EP':>3} {'work':<4} {'busiest':>7} {'arm':<27} "
          f"{'pass':<13} {'load':<9}{columns}   torch:{columns}   ratio{bf16_columns if any_bf16 else ''}")  # fmt: skip
    for (_, measure, load), row in ours.items():
        other, bf16 = of_pass.get((measure, load)), of_pass.get((f"{measure}-bf16", load))
        line = f"{sizes_text(row)}{cells(row)}"
        if other:
            line += f"         {cells(other)} {other['ms'] / row['ms']:7.3f}"
        if bf16:
            line += f"         {bf16['ms']:9.4f} {bf16['ms'] / row['ms']:7.3f}"
        print(line, flush=True)


def common_flags(options, shape):
    words = ["--shape", shape, "--iterations", str((options.iterations + 1) // 2)]
    for load in options.load:
        words += ["--load", load]
    return words + (["--backward"] if options.backward else [])


def program_flags(options):
    words = []
    for flag, value in (("--arms", options.arms), ("--chunks", options.chunks)):
        words += [flag, str(value)] if value is not None else []
    for settings in vars(options)["with"] or []:
        words += ["--with", settings]
    return words


def program_command(options):
    mpirun = [*os.environ.get("MPIRUN", "mpirun").split(), "-n", str(options.ranks)] if options.ranks > 1 else []
    return [*mpirun, options.beside]


def bench_ours(options, workloads):
    """Workloads that torch does not have here: as the program prints them."""
    words = program_command(options) + ["--iterations", str(options.iterations)] + program_flags(options)
    for flag, values in (("--shape", options.shape or []), ("--workload", workloads), ("--load", options.load)):
        for value in values:
            words += [flag, value]
    words += ["--backward"] if options.backward else []
    words += ["--json", options.json] if options.json else []
    sys.stdout.flush()
    try:
        code = subprocess.run(words).returncode
    except OSError as error:
        fail(words[0], f"cannot be run: {error.strerror}")
    if code != 0:
        sys.exit(code)


def bench_beside(options, shapes):
    ranks = str(options.ranks)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks] if options.ranks > 1 else []
    commands = {"ours": program_command(options), "torch": [sys.executable, *torchrun, os.path.abspath(__file__)]}
    with tempfile.TemporaryDirectory() as folder:
        for name, _ in shapes:
            runs, said = {"ours": [], "torch": []}, []
            for who in ("ours", "torch", "torch", "ours"):
                words = commands[who] + common_flags(options, name) + (program_flags(options) if who == "ours" else [])
                rows, notes = run_program(words, os.path.join(folder, "rows.json"))
                runs[who].append(rows)
                said += [note for note in notes if note not in said]
                add_rows(options.json, rows)
            print("\n".join([f"\n{name}, W0", *said]))
            print_beside(mean_rows(runs["ours"]), mean_rows(runs["torch"]))


# ---- flags ----


def number_from(least):
    def read(text):
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            raise argparse.ArgumentTypeError(f"found '{text}', wanted a number from {least} on")
        return int(text)

    return read


def read_shape(text):
    """Names and sizes."""
    if text == "all":
        return list(SHAPES.items())
    if text in SHAPES:
        return [(text, SHAPES[text])]
    words = text.split(",")
    if len(words) != len(SIZES) or not all(word.isascii() and word.isdigit() for word in words):
        fail("--shape", f"found '{text}', wanted all, one of {', '.join(SHAPES)}, or T,H,I,E,K,S")
    shape = tuple(map(int, words))
    if min(shape[:5]) < 1 or shape[4] > shape[3]:
        fail("--shape", f"found '{text}', wanted sizes above 0 and K at most E")
    return [(text, shape)]


def read_flags():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)  # fmt: skip
    add = parser.add_argument
    add("--shape", action="append", metavar="NAME", help="name, T,H,I,E,K,S, or all; may be repeated")
    add("--workload", action="append", metavar="W0", choices=WORKLOADS, help="of torch W0 alone")
    add("--iterations", type=number_from(1), default=100, metavar="N", help="passes that are timed, at least (100)")
    add("--load", action="append", choices=list(PASSES), help="default: both")
    add("--backward", action="store_true", help="the backward pass too, as bench_layer")
    add("--json", metavar="FILE", help="adds every row to a file as a line of JSON")
    add("--beside", metavar="PROGRAM", help="build/cuda/tests/bench_layer, to be run by turns")
    add("--ranks", type=number_from(1), default=1, metavar="N", help="of both, with --beside")
    add("--arms", metavar="LIST", help="of bench_layer, as the next ones; without --beside they mean nothing")
    add("--with", action="append", metavar="SETTINGS", help="see bench_layer --help; may be repeated")
    add("--chunks", type=number_from(2), metavar="N", help="see bench_layer --help")
    add("--parts", action="store_true", help="see bench_layer --help")
    options = parser.parse_args()
    options.load = [load for load in PASSES if load in (options.load or PASSES)]  # bursts first: a load leaves it warm
    return options


def main():
    options = read_flags()
    workloads = WORKLOADS[:-1] if "all" in (options.workload or []) else options.workload or ["W0"]
    others = [workload for workload in workloads if workload != "W0"]
    shapes = [shape for text in options.shape or DEFAULT_SHAPES for shape in read_shape(text)]
    if others and not options.beside:
        print(f"bench_layer.py: {', '.join(others)} is left out: torch has W0 alone here")
    if "W0" in workloads and options.beside:
        bench_beside(options, shapes)
    elif "W0" in workloads:
        bench_torch(options, shapes)
    if others and options.beside:
        bench_ours(options, others)


if __name__ == "__main__":
    main()
