#!/usr/bin/env python3
"""Times cuDNN's attention, as torch's scaled_dot_product_attention calls it, as tests/bench_attention.c times ours.

    scripts/bench_attention.py                                                   cuDNN alone
    scripts/bench_attention.py --beside build/cuda/tests/bench_attention         both, by turns
    scripts/bench_attention.py --only 128/64/128                                 heads of these sizes alone

A burst is 20 calls after 60 ms in which the GPU did nothing; sustained are 20 calls after 100 ms of such calls. Times
are medians. Operations are those of the causal half, B heads T^2 (dn + dr + dv), and backward 2.5 times as many. With
--beside each size is measured in the order ours, cuDNN, cuDNN, ours, and the table has means of the two; a ratio above
1 says that ours is faster. A row that ends in "host: cuDNN" or "host: ours" is one where the GPU waited for the host:
that one could be faster.

The two are given slightly different work. Ours reads one rotary key that all heads share, and sums its gradient over
them. cuDNN gets keys that are joined already, and neither the join nor that sum is timed.

Exit code 2: something is missing. Needs torch with cuDNN, and a GPU.
"""

import argparse
import ctypes
import subprocess
import sys
import time

HEADS = 16
SIZES = ["128/64/128 4x4096", "128/64/128 16x1024", "128/64/128 2x8192", "64/32/64 4x4096", "64/32/64 16x1024",
         "32/16/32 4x4096", "32/16/32 16x1024", "64/64/128 4x4096", "64/64/128 16x1024"]  # fmt: skip
PASSES = [("forward", "burst"), ("forward", "sustained"), ("backward", "burst"), ("backward", "sustained")]

IDLE_SECONDS, START_SECONDS, LOAD_MS = 0.06, 1, 100
REPEATS, WARMUPS = 20, 3
BALLAST_BYTES, BALLASTS = 1 << 30, 8


def fail(place, message):
    print(f"bench_attention.py: error: {place}: {message}", file=sys.stderr)
    sys.exit(2)


def import_torch():
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: F401
    except ImportError as error:
        fail(error.name or "torch", "found none, wanted torch 2.5 or later; python3 -m pip install torch")
    if not torch.cuda.is_available():
        fail("torch", "found no GPU, wanted one; nvidia-smi lists them, and torch must be a build for CUDA")
    if not torch.backends.cudnn.is_available():
        fail("torch", "found no cuDNN, wanted it; install a build of torch that has it")
    return torch


def read_size(size):
    """Sizes of heads (dn, dr, dv), sequences and tokens of each."""
    heads, tokens = size.split()
    return *map(int, heads.split("/")), *map(int, tokens.split("x"))


def count_flops(size, name):
    dn, dr, dv, batch, length = read_size(size)
    return batch * HEADS * length**2 * (dn + dr + dv) * (2.5 if name == "backward" else 1)


# ---- the clock of the multiprocessors, by NVML where it is ----


class Clock:
    def __init__(self, torch):
        self.nvml, self.device = None, ctypes.c_void_p()
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
            uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode()
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


# ---- cuDNN ----


class Cudnn:
    def __init__(self, torch):
        self.torch, self.clock = torch, Clock(torch)
        self.ballast = torch.empty(BALLAST_BYTES, dtype=torch.uint8, device="cuda")
        self.starts, self.ends = ([torch.cuda.Event(enable_timing=True) for _ in range(REPEATS)] for _ in range(2))

    def time_calls(self, call):
        """Median of calls one right after the other: ms, MHz, whether the GPU has waited for the host."""
        for start, end in zip(self.starts, self.ends):
            start.record()
            call()
            end.record()
        waited = self.ends[-2].query()
        self.ends[REPEATS // 2].synchronize()  # the clock in the midst of the calls, not in the ballast
        mhz = self.clock.read()
        self.torch.cuda.synchronize()
        times = sorted(start.elapsed_time(end) for start, end in zip(self.starts, self.ends))
        return times[REPEATS // 2], mhz, waited

    def burst(self, call):
        call()  # the first call looks for a kernel
        self.torch.cuda.synchronize()
        time.sleep(IDLE_SECONDS)
        for i in range(BALLASTS):  # keeps the GPU busy until the calls are queued
            self.ballast.fill_(i)
        for _ in range(WARMUPS):
            call()
        return self.time_calls(call)

    def sustained(self, call, ms):
        for _ in range(1 + int(LOAD_MS / ms)):
            call()
        return self.time_calls(call)

    def make_calls(self, size):
        """Both passes, over tensors that lie as [B, T, heads, columns]."""
        torch, (dn, dr, dv, batch, length) = self.torch, read_size(size)

        def make(columns):
            x = torch.randn(batch, length, HEADS, columns, device="cuda", dtype=torch.bfloat16)
            return x.transpose(1, 2).requires_grad_()

        q, k, v = make(dn + dr), make(dn + dr), make(dv)

        def forward():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        o, d_o = forward(), make(dv).detach()

        def backward():
            return torch.autograd.grad(o, (q, k, v), d_o, retain_graph=True)

        return {"forward": forward, "backward": backward}

    def measure(self, size):
        """(pass, load) -> ms, MHz, whether the GPU has waited for the host. Empty: cuDNN does not take this size."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        time.sleep(START_SECONDS)  # ours is a new process each time, and the GPU idle while it starts
        rows = {}
        try:
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
                calls = self.make_calls(size)
                for name, call in calls.items():  # first, since a load leaves the GPU warm
                    rows[name, "burst"] = self.burst(call)
                for name, call in calls.items():
                    rows[name, "sustained"] = self.sustained(call, rows[name, "burst"][0])
        except RuntimeError as error:
            print(f"cuDNN, {size}: {str(error).splitlines()[0]}")
        return rows


# ---- ours ----


def measure_program(program, size):
    """The same of the program: it prints a line for each pass and load."""
    try:
        done = subprocess.run([program, *size.split()], capture_output=True, text=True, errors="replace")
    except OSError as error:
        fail(program, f"cannot be run: {error.strerror}; make bench-attention builds it")
    if done.returncode != 0:
        fail(program, f"ended with exit code {done.returncode}: {done.stderr.strip()}")
    rows = {}
    for words in map(str.split, done.stdout.splitlines()):
        if len(words) in (8, 9) and tuple(words[3:5]) in PASSES:
            mhz = None if words[7] == "-" else int(words[7])
            rows[words[3], words[4]] = float(words[5]), mhz, words[8:] == ["host"]
    if len(rows) != len(PASSES):
        fail(program, f"found {len(rows)} rows for {size}, wanted {len(PASSES)}; is it bench_attention?")
    return rows


# ---- the table ----


def mean_of(runs):
    """Means of several measurements of one size."""
    rows = {}
    for key in PASSES:
        found = [run[key] for run in runs if key in run]
        clocks = [mhz for _, mhz, _ in found if mhz is not None]
        if found:
            ms = sum(ms for ms, _, _ in found) / len(found)
            rows[key] = ms, round(sum(clocks) / len(clocks)) if clocks else None, any(waited for *_, waited in found)
    return rows


def cells(size, key, rows):
    if key not in rows:
        return f" {'-':>9} {'-':>8} {'-':>5}"
    ms, mhz, _ = rows[key]
    return f" {ms:9.4f} {1e-9 * count_flops(size, key[0]) / ms:8.1f} {mhz or '-':>5}"


def print_rows(size, ours, cudnn):
    """ours: None where it is not measured."""
    heads, tokens = size.split()
    batch, length = tokens.split("x")
    for key in PASSES:
        line = f"{heads:<11} {batch:>4} {length:>6}  {key[0]:<8} {key[1]:<9}"
        if ours is not None:
            line += cells(size, key, ours) + "  "
        line += cells(size, key, cudnn)
        if ours is not None and key in ours and key in cudnn:
            line += f" {cudnn[key][0] / ours[key][0]:7.3f}"
        waits = [who for who, rows in (("ours", ours or {}), ("cuDNN", cudnn)) if key in rows and rows[key][2]]
        print(line + (f"  host: {', '.join(waits)}" if waits else ""), flush=True)


def print_head(torch, beside):
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, "
          f"{HEADS} heads, medians of {REPEATS} calls")  # fmt: skip
    columns = f" {'ms':>9} {'TFLOP/s':>8} {'MHz':>5}"
    if beside:
        print(f"{'':43} {'ours':>24}   {'cuDNN':>24}")
    print(f"{'dn/dr/dv':<11} {'B':>4} {'T':>6}  {'pass':<8} {'load':<9}" +
          (f"{columns}  {columns}   ratio" if beside else columns))  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", metavar="PROGRAM", help="build/cuda/tests/bench_attention, to be run by turns")
    parser.add_argument("--only", metavar="DN/DR/DV", help="heads of these sizes alone")
    options = parser.parse_args()
    sizes = [size for size in SIZES if options.only in (None, size.split()[0])]
    if not sizes:
        fail("--only", f"found {options.only}, wanted one of {', '.join(sorted({s.split()[0] for s in SIZES}))}")
    torch = import_torch()
    cudnn = Cudnn(torch)
    print_head(torch, options.beside)
    for size in sizes:
        if options.beside:
            order = ["ours", "cudnn", "cudnn", "ours"]
            runs = [(who, measure_program(options.beside, size) if who == "ours" else cudnn.measure(size))
                    for who in order]  # fmt: skip
            print_rows(size, *(mean_of([run for name, run in runs if name == who]) for who in ("ours", "cudnn")))
        else:
            print_rows(size, None, cudnn.measure(size))


if __name__ == "__main__":
    main()
