#!/usr/bin/env python3
"""Compares a checkpoint in this trainer with the same folder in Hugging Face transformers: logits of a text, then the
text that each of them goes on with.

    scripts/check_transformers.py CHECKPOINT                    a run folder's step-..., or any DeepseekV3 folder
    scripts/check_transformers.py CHECKPOINT --program build/cuda/train --device cuda --prompt "Once upon a time"

transformers computes in FP32, from the weights as the files have them. The relative error is |ours - theirs| / |theirs|
over all logits of the prompt. A checkpoint in FP32 may be off by 1e-4. One in BF16 was made where activations are
rounded to BF16 too: it may be off by twice as much as transformers' own BF16 pass is, or by 0.01 where that is less.
--tolerance says otherwise. Texts are greedy; they are shown and counted, but a near tie may part them, and no more
follows from it.

Exit code 0: logits agree. 1: they do not. 2: something is missing. Needs torch, safetensors and a transformers that
masks excluded groups of experts with -inf (5.17 does; older ones put 0, which beats negative biased scores).
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

FP32_TOLERANCE = 1e-4
BF16_LEAST_TOLERANCE = 0.01


def fail(place, message):
    print(f"check_transformers.py: error: {place}: {message}", file=sys.stderr)
    sys.exit(2)


def import_libraries():
    try:
        import safetensors.torch
        import torch
        import transformers
    except ImportError as error:
        fail(error.name, "found none, wanted it; python3 -m pip install torch safetensors transformers")
    transformers.logging.set_verbosity_error()  # check_loading has its own opinion of tensors that are not expected
    transformers.logging.disable_progress_bar()
    return torch, safetensors.torch, transformers


# ---- ours ----


def run_program(options):
    """Its greedy text, and the file of tokens and logits."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "logits.safetensors"
        command = [options.program, "--generate", str(options.count), "--from", options.checkpoint, "--prompt",
                   options.prompt, "--temperature", "0", "--logits", file]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        except OSError as error:
            fail(options.program, f"cannot be run: {error.strerror}; build it, or name another by --program")
        if done.returncode != 0:
            fail(options.program, f"ended with exit code {done.returncode}: {done.stderr.strip()}")
        return done.stdout.rstrip("\n"), options.safetensors.load_file(file)


# ---- theirs ----


def check_loading(info, layers):
    """Every weight has its place. MTP modules lie behind the last layer; transformers has none."""

    def is_module(name):
        parts = name.split(".")
        return parts[:2] == ["model", "layers"] and int(parts[2]) >= layers

    unexpected = [name for name in info["unexpected_keys"] if not is_module(name)]
    wrong = {"missing": info["missing_keys"], "unexpected": unexpected, "misshapen": info["mismatched_keys"]}
    for what, names in wrong.items():
        if names:
            fail("transformers", f"found {len(names)} {what} tensors, wanted none, one is {next(iter(names))}")


def load(options, config, dtype):
    model, info = options.transformers.DeepseekV3ForCausalLM.from_pretrained(
        options.checkpoint, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    check_loading(info, config["num_hidden_layers"])
    return model.eval().to(options.device)


def logits_of(options, model, tokens):
    with options.torch.inference_mode():
        return model(tokens[None].to(options.device)).logits[0].float().cpu()


def text_of(options, model, config, tokens):
    """Greedy, from the same ids; without the end of text that they begin with."""
    tokenizer = options.transformers.AutoTokenizer.from_pretrained(options.checkpoint)
    ids = tokens[None].to(options.device)
    with options.torch.inference_mode():
        out = model.generate(ids, attention_mask=options.torch.ones_like(ids), max_new_tokens=options.count,
                             do_sample=False, eos_token_id=config.get("eos_token_id"))  # fmt: skip
    return tokenizer.decode(out[0][1:], skip_special_tokens=True).rstrip("\n")


# ---- the comparison ----


def relative_error(a, b):
    a, b = a.double(), b.double()
    return ((a - b).norm() / b.norm()).item()


def choose_tolerance(options, config, tokens, theirs):
    dtype = config.get("dtype") or config.get("torch_dtype")
    if options.tolerance is not None:
        return options.tolerance, "as given"
    if dtype == "float32":
        return FP32_TOLERANCE, "for FP32"
    own = relative_error(logits_of(options, load(options, config, options.torch.bfloat16), tokens), theirs)
    return max(2 * own, BF16_LEAST_TOLERANCE), f"transformers in BF16 is off by {own:.2e}"


def common_length(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def compare(options):
    config = json.loads((pathlib.Path(options.checkpoint) / "config.json").read_text())
    our_text, file = run_program(options)
    tokens, ours = file["tokens"], file["logits"]
    model = load(options, config, options.torch.float32)
    theirs = logits_of(options, model, tokens)
    if ours.shape != theirs.shape:
        fail("logits", f"found {tuple(ours.shape)} here and {tuple(theirs.shape)} in transformers, wanted the same")
    their_text = text_of(options, model, config, tokens)
    del model
    tolerance, why = choose_tolerance(options, config, tokens, theirs)
    error = relative_error(ours, theirs)
    same = (ours.argmax(-1) == theirs.argmax(-1)).sum().item()
    agree = error <= tolerance  # false for NaN

    print(f"--- ours ---\n{our_text}\n--- theirs ---\n{their_text}\n---")
    print(f"text: the first {common_length(our_text, their_text)} characters of {len(their_text)} are the same")
    print(f"logits: {tuple(ours.shape)}, the likeliest token is the same at {same} of {len(ours)} positions")
    print(f"relative error {error:.2e}, tolerance {tolerance:.2e} ({why}): {'agree' if agree else 'DIFFER'}")
    return 0 if agree else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder with config.json, weights and tokenizer")
    parser.add_argument("--program", default="./train", help="this trainer (default ./train)")
    parser.add_argument("--prompt", default="Once upon a time", help="text that is compared and gone on from")
    parser.add_argument("--count", type=int, default=100, help="tokens to go on with (default 100)")
    parser.add_argument("--device", help="of transformers (default: cuda if there is one, else cpu)")
    parser.add_argument("--tolerance", type=float, help="largest relative error of the logits")
    options = parser.parse_args()
    if not (pathlib.Path(options.checkpoint) / "config.json").is_file():
        fail(options.checkpoint, "found no config.json, wanted a checkpoint's folder, such as runs/tiny/step-00001200")
    options.torch, options.safetensors, options.transformers = import_libraries()
    options.device = options.device or ("cuda" if options.torch.cuda.is_available() else "cpu")
    options.torch.backends.cuda.matmul.allow_tf32 = False
    sys.exit(compare(options))


if __name__ == "__main__":
    main()
