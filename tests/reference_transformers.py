"""Numbers for tests/test_transformers.c that nobody here wrote: logits, loss and every gradient of a checkpoint that this
trainer exported, computed by Hugging Face transformers' DeepseekV3ForCausalLM in FP32.

    python3 tests/reference_transformers.py make     trains the small checkpoint and writes tests/reference/ anew
    python3 tests/reference_transformers.py compare CHECKPOINT
                                                     greedy text of any checkpoint, here and in transformers
    python3 tests/reference_transformers.py reload CHECKPOINT
                                                     loss of any checkpoint, and of what transformers saves of it

Needs torch, safetensors and a transformers that masks excluded groups with -inf (5.17 does; older ones put 0, which
beats negative biased scores); the C test needs only the files in tests/reference/.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, DeepseekV3ForCausalLM

ROOT = pathlib.Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "tests" / "reference"
SEQUENCES, LENGTH = 2, 16

# Every branch that transformers has: q compression, groups, a dense layer, a shared expert. The large initialisation and
# bias rate make attention and routing far from uniform after a few steps. MTP and the balance loss are not in it.
FLAGS = """--preset unit --hidden 32 --layers 3 --heads 2 --nope-dim 8 --rope-dim 8 --value-dim 6 --q-rank 16 --kv-rank 12
--intermediate 48 --expert-intermediate 16 --mtp-depth 0 --seq 32 --batch 4 --steps 8 --warmup 0 --lr 0.01 --init-std 0.25
--bias-rate 0.02 --rms-eps 1e-5 --data stories --sample-tokens 0 --save-every 8 --eval-every 0""".split()


def export_checkpoint(folder):
    subprocess.run([ROOT / "train", *FLAGS, "--out", folder], check=True, stdout=subprocess.DEVNULL)
    return pathlib.Path(folder) / "step-00000008"


def load(folder):
    model, info = DeepseekV3ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()


def gradients_by_file_name(model):
    """transformers keeps a layer's experts in two tensors; files have three per expert."""
    out = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for e in range(grad.shape[0]):
                gate, up = grad[e].chunk(2, dim=0)
                out[f"{prefix}{e}.gate_proj.weight"], out[f"{prefix}{e}.up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            for e in range(grad.shape[0]):
                out[f"{prefix}{e}.down_proj.weight"] = grad[e]
        else:
            out[name] = grad
    return {f"grad.{name}": grad.contiguous().clone() for name, grad in out.items()}


def make():
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = export_checkpoint(scratch)
        model = load(checkpoint)
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, model.config.vocab_size, (SEQUENCES, LENGTH + 1), generator=generator)
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        tensors = {"tokens": tokens, "logits": logits.detach().contiguous(), "loss": loss.detach().reshape(1)}
        tensors |= gradients_by_file_name(model)

        shutil.rmtree(REFERENCE / "checkpoint", ignore_errors=True)
        (REFERENCE / "checkpoint").mkdir(parents=True)
        for file in [*checkpoint.glob("model*"), checkpoint / "config.json"]:
            shutil.copy(file, REFERENCE / "checkpoint")
        save_file(tensors, REFERENCE / "transformers.safetensors")
        print(f"{len(tensors)} tensors, loss {loss.item():.6f}")


def compare(checkpoint, prompt="Once upon a time", count=100):
    ours = subprocess.run(
        [ROOT / "train", "--generate", str(count), "--from", checkpoint, "--prompt", prompt, "--temperature", "0"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = load(checkpoint)
    end = json.loads((pathlib.Path(checkpoint) / "config.json").read_text())["eos_token_id"]
    ids = torch.tensor([[end] + tokenizer.encode(prompt, add_special_tokens=False)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=end)
    theirs = tokenizer.decode(out[0][1:], skip_special_tokens=True)
    print(f"ours:   {ours.strip()}\ntheirs: {theirs.strip()}\nequal: {ours.strip() == theirs.strip()}")
    return 0 if ours.strip() == theirs.strip() else 1


def evaluate(folder):
    flags = ["--data", "stories", "--eval-sequences", "16", "--seq", "128", "--batch", "4"]
    said = subprocess.run(
        [ROOT / "train", "--evaluate", "--from", folder, *flags], check=True, capture_output=True, text=True
    ).stdout
    return float(re.search(r"\| loss ([0-9.]+)", said)[1])


def reload(checkpoint):
    before = evaluate(checkpoint)
    equal = True
    # Rounded to 8 bits, weights are off by up to 2^-9 of themselves, and the loss by a small part of that.
    for dtype, tolerance in (torch.float32, 0), (torch.bfloat16, 0.01):
        with tempfile.TemporaryDirectory() as folder:
            load(checkpoint).to(dtype).save_pretrained(folder)
            AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)
            after = evaluate(folder)
            run = [ROOT / "train", "--from", folder, "--seq", "64", "--steps", "1", "--batch", "2", "--warmup", "0"]
            subprocess.run([*run, "--sample-tokens", "0", "--out", folder + "/run"], check=True, capture_output=True)
        print(f"{dtype}: loss {before:.4f} before, {after:.4f} as saved by transformers; a run starts from it")
        equal = equal and abs(after - before) <= tolerance
    return 0 if equal else 1


if __name__ == "__main__":
    if sys.argv[1:] == ["make"]:
        make()
    elif len(sys.argv) == 3 and sys.argv[1] == "compare":
        sys.exit(compare(sys.argv[2]))
    elif len(sys.argv) == 3 and sys.argv[1] == "reload":
        sys.exit(reload(sys.argv[2]))
    else:
        sys.exit(__doc__)
