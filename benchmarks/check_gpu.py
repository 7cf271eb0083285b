"""What tests cannot see without a GPU: kernels, captured graphs, compiled passes and noise there.

    python benchmarks/check_gpu.py

Clipped sums on the GPU against plain autograd in float64 on the CPU, one unit at a time; units
whose tokens cancel, which rounding may not take above the bound; units that share a pass with
others, and must come out of it bitwise the same; the noise against ChaCha written out in Python and against the normal law. Exits 1 where one is off.
"""

import copy
import math
import sys
from types import SimpleNamespace

import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tightlip.models import LSTMConfig, LSTMForCausalLM
from tightlip.models.configurations import GRUConfig, TransformerConfig
from tightlip.models.recurrent import GRUForCausalLM
from tightlip.models.transformer import TransformerForCausalLM
from tightlip.privacy.clipping import Clip, clipped_sum
from tightlip.privacy.layers import Layout, Outer, fp32_product
from tightlip.privacy.passes import Passes, Physical
from tightlip.privacy.physical_batches import Shape
from tightlip.privacy.rows_alone import first_change, perturbed

VOCABULARY = 501  # odd, so that columns must be added
TOLERANCE = {"float32": 2e-3, "bf16": 3e-2}
MODELS = {
    "LSTM": lambda tied: LSTMForCausalLM(LSTMConfig(vocab_size=VOCABULARY, embedding_size=50, hidden_size=50, num_layers=2, tie_word_embeddings=tied)),
    "GRU": lambda tied: GRUForCausalLM(GRUConfig(vocab_size=VOCABULARY, embedding_size=50, hidden_size=50, num_layers=2, tie_word_embeddings=tied)),
    "Transformer": lambda tied: TransformerForCausalLM(TransformerConfig(vocab_size=VOCABULARY, hidden_size=48, num_heads=4, num_layers=2, max_position_embeddings=32, tie_word_embeddings=tied)),
    "GPT-2": lambda tied: GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=48, n_head=4, n_layer=2, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, tie_word_embeddings=tied)),
    "Llama": lambda tied: LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32, tie_word_embeddings=tied)),
}  # fmt: skip
STOCK = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}  # fmt: skip
FAMILIES = {
    **MODELS,
    "Gemma": lambda tied: GemmaForCausalLM(GemmaConfig(**STOCK, num_key_value_heads=1, head_dim=64)),
    "Qwen 3": lambda tied: Qwen3ForCausalLM(Qwen3Config(**STOCK, num_key_value_heads=2, head_dim=64)),
    "GPT-NeoX": lambda tied: GPTNeoXForCausalLM(GPTNeoXConfig(**STOCK)),
}  # fmt: skip
failed = []


def report(name, off, limit):
    good = off <= limit
    print(f"{'ok ' if good else 'BAD'} {name:58} {off:.1e} (at most {limit:g})", flush=True)
    if not good:
        failed.append(name)


def batch(device):
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (6, 20), generator=draw)
    targets = torch.randint(0, VOCABULARY, (6, 20), generator=draw)
    targets[0, 9:] = -100
    own = torch.tensor([2, 2, 2])
    layout = Layout(num_units=3, rows_per_unit=2)
    return Physical.of(ids.to(device), targets.to(device), own.to(device), layout)


def check_sums(names=tuple(MODELS)):
    for name, make in ((each, MODELS[each]) for each in names):
        for tied in (False, True):
            torch.manual_seed(0)
            model = make(tied)
            exact = Passes(copy.deepcopy(model).double(), Clip(norm=0.1), way="slow")(batch("cpu"))
            model.cuda()
            ways = ["eager", "graph"] if name in ("LSTM", "GRU", "Transformer") else ["eager"]
            # One model compiled is enough to see that a compiled pass is the same sum.
            ways += ["compile"] if (name, tied) == ("Transformer", True) else []
            for way in ways:
                for kind in ("float32", "bf16"):
                    found = Passes(model, Clip(norm=0.1), way=way, bf16=kind == "bf16")(
                        batch("cuda")
                    )
                    total = math.sqrt(sum(float(g.norm()) ** 2 for g in exact.gradients.values()))
                    off = math.sqrt(
                        sum(
                            float((found.gradients[key].cpu().double() - gradient).norm()) ** 2
                            for key, gradient in exact.gradients.items()
                        )
                    )
                    label = f"{name}{' tied' if tied else ''}, {way}, {kind}"
                    report(f"{label}: clipped sum", off / total, TOLERANCE[kind])
                    norms = (found.norms.cpu() / exact.norms - 1).abs().max()
                    report(f"{label}: norms", float(norms), TOLERANCE[kind] / 3)


def check_rows_alone(device="cuda", names=tuple(FAMILIES)):
    """A unit among others, at another place among others still: nothing of it may move.

    Eager passes are compared in everything that is noted of every parameter, captured and compiled
    ones in losses and norms.
    """
    for name in names:
        prepared = {"LSTM": ["graph"], "GRU": ["graph"], "Transformer": ["graph", "compile"]}
        for way in ["eager", *(prepared.get(name, []) if device == "cuda" else [])]:
            for kind in ("float32", "bf16"):
                torch.manual_seed(0)
                model = FAMILIES[name](False).to(device).eval()
                passes = Passes(model, Clip(norm=0.1), way=way, bf16=kind == "bf16")
                moved, shapes = 0, [Shape(8, 1, 64), Shape(32, 1, 63), Shape(32, 4, 16)]
                if getattr(model.config, "max_position_embeddings", 0) >= 256:
                    shapes.append(Shape(256, 1, 32))
                for shape in shapes:
                    with perturbed(passes.parameters, 1.0):
                        reason = first_change(passes, shape, VOCABULARY)
                    if reason is not None:
                        moved += 1
                        print(
                            f"    {shape.width} × {shape.rows_per_unit} × {shape.num_units}: {reason}"
                        )
                report(f"{name}, {way}, {kind}: shapes where others move a unit", moved, 0)


def check_cancelling():
    """No unit moves the sum by more than the bound, though its tokens cancel nearly wholly."""
    for kind, dtype in (("bf16", torch.bfloat16), ("tf32", torch.float32)):
        torch.set_float32_matmul_precision("high")
        for name, shape in {"left": (300, 400), "right": (400, 300), "small": (24, 32)}.items():
            most = most_before = 0.0
            for seed in range(20):
                left, right = cancelling(seed, shape, dtype)
                use, layout = Outer(left.cuda(), right.cuda()), Layout(num_units=1, rows_per_unit=1)
                watch = SimpleNamespace(uses={"w": [use]}, finite={})
                own = {"w": torch.nn.Parameter(torch.zeros(shape, device="cuda"))}
                found = clipped_sum(
                    watch, own, torch.zeros(1, device="cuda"), layout, Clip(norm=1.0)
                )
                length = float(found.gradients["w"].double().norm())
                most = max(most, length)
                # What the norm alone would have let through: the factor is known from both.
                exact = left[0].double().t() @ right[0].double()
                most_before = max(
                    most_before, length_by_norm(left, right, float(exact.norm()), dtype)
                )
            torch.set_float32_matmul_precision("highest")
            report(
                f"{kind}, {name} scaled, tokens that cancel ({most_before:.3g} by the norm alone)",
                most,
                1.0,
            )
    report("the kernel's norms and rounding are those of torch", kernel_gap(), 1e-4)


def cancelling(seed, shape, dtype):
    """Tokens of whole numbers, the second half minus the first in other portions, and a little."""
    torch.manual_seed(seed)
    sizes = shape if shape[0] <= shape[1] else shape[::-1]
    first = torch.randint(128, 256, (sizes[0],)).double().expand(60, -1)
    second, missing = (
        torch.randint(128, 256, (60, sizes[0])).double(),
        torch.zeros(sizes[0]).double(),
    )
    for _ in range(4):
        missing = first.sum(0) - second.sum(0)
        second = (second + (missing / 60).round()).clamp(1, 255)
    for token in second:
        missing = first.sum(0) - second.sum(0)
        token.copy_((token + missing.clamp(-20, 20)).clamp(1, 255))
    rest = (8 * torch.randn(1, sizes[0])).round().double()
    narrow = torch.cat([first, -second, rest])[None]
    if dtype == torch.float32:
        narrow = narrow * 1.0009  # more digits than tf32 has
    wide = torch.randint(128, 256, (sizes[1],)).double().expand(1, 121, -1).contiguous()
    both = (narrow, wide) if shape[0] <= shape[1] else (wide, narrow)
    return both[0].to(dtype), both[1].to(dtype)


def length_by_norm(left, right, norm, dtype):
    """How far such a unit would go if its factor were the bound over its norm."""
    factor = 1 / norm / (1 + (2.0**-7 if dtype == torch.bfloat16 else 2.0**-9))
    if left.shape[2] <= right.shape[2]:
        left = (left * torch.tensor([factor])).to(dtype)
    else:
        right = (right * torch.tensor([factor])).to(dtype)
    torch.set_float32_matmul_precision("high")
    return float(fp32_product(left[0].cuda().t(), right[0].cuda()).double().norm())


def kernel_gap():
    """The fused kernel against torch's own operations on the CPU, every choice of sides."""
    from tightlip.privacy.norms import _of_pairs

    torch.manual_seed(0)
    worst = 0.0
    for size in (7, 64, 100):
        grams = [each @ each.transpose(1, 2) for each in torch.randn(2, 5, size, 80)]
        for rounds in ((2.0**-8, 0.0), (0.0, 2.0**-8), (2.0**-10, 2.0**-10), (0.0, 0.0)):
            slow = _of_pairs(grams[0], grams[1], rounds)
            fast = _of_pairs(grams[0].cuda(), grams[1].cuda(), rounds)
            for one, other in zip(slow, fast, strict=True):
                if one is not None:
                    worst = max(worst, float(((one - other.cpu()) / one).abs().max()))
    return worst


def check_poison():
    torch.manual_seed(0)
    model = MODELS["LSTM"](False).cuda()
    given = batch("cuda")
    clean = Passes(model, Clip(norm=0.1), way="graph")(given)
    others = [gradient.clone() for gradient in clean.gradients.values()]
    with torch.no_grad():
        model.model.embed_tokens.weight[500] = float("nan")
    ids = given.ids_BT.clone()
    ids[ids == 500] = 3
    poisoned = ids.clone()
    poisoned[:2] = 500  # the first unit's rows
    passes = Passes(model, Clip(norm=0.1), way="graph")
    # Without its first unit the sum is that of a batch where this unit has nothing to predict.
    mute = given.targets_BT.clone()
    mute[:2] = -100
    layout, own = given.layout, torch.tensor([2, 2, 2], device="cuda")
    first = [
        g.clone()
        for g in passes(Physical.of(poisoned, given.targets_BT, own, layout)).gradients.values()
    ]
    second = [g.clone() for g in passes(Physical.of(ids, mute, own, layout)).gradients.values()]
    off = max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))
    report("a unit that is not finite contributes nothing", off, 1e-6)
    report("and the others are there", 0.0 if float(others[0].norm()) > 0 else 1.0, 0.5)


def check_regularisers():
    """Regularised steps in a graph against the same ones taken directly, of several widths."""
    from regularizers import METHODS, Method

    for name in METHODS:
        if not name.endswith(", ours") or name.startswith("plain"):
            continue
        for kind in ("float32", "bf16"):
            weights = []
            for way in (name, name.replace("ours", "torch")):
                method = Method(
                    way, (VOCABULARY, 50, 2, 12, 20, 9), "cuda", kind == "bf16", 7, shortest=2
                )
                start = [p.detach().clone() for p in method.model.parameters()]
                method.take_round()
                moved = [
                    p.detach() - s for p, s in zip(method.model.parameters(), start, strict=True)
                ]
                weights.append(torch.cat([part.flatten() for part in moved]))
            off = float((weights[0] - weights[1]).norm() / weights[1].norm())
            # Adam takes the sign of small gradients, so rounding shows more than in sums.
            report(f"{name}, {kind}: nine steps", off, 10 * TOLERANCE[kind])


def chacha_words(key, counter, nonce, double_rounds):
    """RFC 8439's block function, word by word."""
    mask = 0xFFFFFFFF
    state = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574, *(k & mask for k in key)]
    state += [counter & mask, counter >> 32, *(n & mask for n in nonce)]
    x = list(state)

    def rotate(value, by):
        return ((value << by) | (value >> (32 - by))) & mask

    def quarter(a, b, c, d):
        for first, second, third, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[first] = (x[first] + x[second]) & mask
            x[third] = rotate(x[third] ^ x[first], by)

    for _ in range(double_rounds):
        for column in range(4):
            quarter(column, 4 + column, 8 + column, 12 + column)
        for diagonal in range(4):
            quarter(
                diagonal, 4 + (diagonal + 1) % 4, 8 + (diagonal + 2) % 4, 12 + (diagonal + 3) % 4
            )
    return [(a + b) & mask for a, b in zip(x, state, strict=True)]


def check_noise():
    from tightlip.privacy.kernels import LANES, GPUNoise

    noise = GPUNoise(torch.device("cuda"), insecure_seed=12345)
    values = torch.zeros(16 * LANES, device="cuda")
    noise.add([values], scale=1.0, share=1.0)
    key, got, worst = noise._key.tolist(), values.cpu(), 0.0
    for lane in (0, 1, 77, 255):
        words = chacha_words(key, lane, [1, 0], noise._double_rounds)
        for pair in range(8):
            spare = 0
            for further in range(4):
                spare = spare << 8 | words[2 * ((pair + further) % 8) + 1] & 0xFF
            uniform = words[2 * pair] * 2**-32 + (spare + 0.5) * 2**-64
            radius = math.sqrt(-2 * math.log(min(uniform, 1.0)))
            angle = (words[2 * pair + 1] >> 8) * 2**-24 * 2 * math.pi
            for place, expected in ((0, radius * math.cos(angle)), (1, radius * math.sin(angle))):
                worst = max(worst, abs(float(got[lane + (2 * pair + place) * LANES]) - expected))
    report("noise is ChaCha through Box and Muller", worst, 1e-5)
    many = torch.zeros(20_000_000, device="cuda")
    secret = GPUNoise(torch.device("cuda"))
    secret.add([many], scale=2.0, share=0.5)
    report("noise: mean", abs(float(many.mean())) * math.sqrt(2e7), 5)
    report("noise: deviation", abs(float(many.std()) - 1) * math.sqrt(4e7), 5)
    report("noise: kurtosis", abs(float((many**4).mean()) - 3) * math.sqrt(2e7 / 96), 5)
    again = torch.zeros_like(many)
    secret.add([again], scale=2.0, share=0.5)
    report("noise: fresh each time", abs(float((many * again).mean())) * math.sqrt(2e7), 5)


if __name__ == "__main__":
    check_noise()
    check_sums()
    check_rows_alone()
    check_cancelling()
    check_poison()
    check_regularisers()
    print(f"{len(failed)} off")
    sys.exit(bool(failed))
