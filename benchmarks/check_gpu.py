"""What tests cannot see without a GPU: kernels, captured graphs, compiled passes and noise there.

    python benchmarks/check_gpu.py [--processes 3] [--only noise exact ...]

Clipped sums on the GPU against plain autograd in float64 on the CPU, one unit at a time; units
whose tokens cancel, which rounding may not take above the bound; units that share a pass with
others, and must come out of it bitwise the same; exact sums; replayed graphs; adapters on a base of
few bits; the noise against the CPU's, which tests compare with interval arithmetic, and against the
normal law. Exits 1 where one is off.
"""

import argparse
import copy
import math
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
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

from tightlip.core.grid_gaussian import GridGaussian
from tightlip.models import LSTMConfig, LSTMForCausalLM
from tightlip.models.configurations import GRUConfig, TransformerConfig
from tightlip.models.recurrent import GRUForCausalLM
from tightlip.models.transformer import TransformerForCausalLM
from tightlip.privacy.clipping import Clip, clipped_sum
from tightlip.privacy.layers import Layout, Outer, fp32_product
from tightlip.privacy.passes import Passes, Physical
from tightlip.privacy.per_unit import keep_differentiable
from tightlip.privacy.physical_batches import Shape
from tightlip.privacy.rounding import Roundings
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


def report_clipped(label, found, exact, tolerance):
    total = math.sqrt(sum(float(g.norm()) ** 2 for g in exact.gradients.values()))
    off = math.sqrt(
        sum(
            float((found.gradients[key].cpu().double() - gradient.cpu()).norm()) ** 2
            for key, gradient in exact.gradients.items()
        )
    )
    report(f"{label}: clipped sum", off / total, tolerance)
    norms = (found.norms.cpu() / exact.norms.cpu() - 1).abs().max()
    report(f"{label}: norms", float(norms), tolerance / 3)


def adapted(tied):
    """Adapters on a frozen base, whose head has an odd width: their gradients are written out."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(MODELS["Transformer"](tied), lora)


def check_sums(names=tuple(MODELS)):
    adapters = {"adapters": adapted} if find_spec("peft") else {}
    for name, make in ({each: MODELS[each] for each in names} | adapters).items():
        for tied in (False, True):
            torch.manual_seed(0)
            model = make(tied)
            exact = Passes(copy.deepcopy(model).double(), Clip(norm=0.1), way="slow")(batch("cpu"))
            model.cuda()
            ways = ["eager", "graph"]
            # One model compiled is enough to see that a compiled pass is the same sum.
            ways += (
                ["compile"] if (name, tied) in {("Transformer", True), ("adapters", False)} else []
            )
            for way in ways:
                for kind in ("float32", "bf16"):
                    found = Passes(model, Clip(norm=0.1), way=way, bf16=kind == "bf16")(
                        batch("cuda")
                    )
                    label = f"{name}{' tied' if tied else ''}, {way}, {kind}"
                    # Two thin matrices average little of bfloat16's rounding out; float32 shows the rule.
                    thin = 2 if (name, kind) == ("adapters", "bf16") else 1
                    report_clipped(label, found, exact, thin * TOLERANCE[kind])


def check_rows_alone(device="cuda", names=tuple(FAMILIES)):
    """A unit among others, at another place among others still: nothing of it may move.

    Eager passes are compared in everything that is noted of every parameter, captured and compiled
    ones in losses and norms.
    """
    for name in names:
        prepared = ["graph", "compile"] if name == "Transformer" else ["graph"]
        for way in ["eager", *(prepared if device == "cuda" else [])]:
            for kind in ("bf16",) if way == "compile" else ("float32", "tf32", "bf16"):
                torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
                torch.manual_seed(0)
                model = FAMILIES[name](False).to(device).eval()
                passes = Passes(model, Clip(norm=0.1), way=way, bf16=kind == "bf16")
                moved, shapes = 0, [Shape(8, 1, 64), Shape(32, 1, 60), Shape(32, 4, 16)]
                if way == "compile":
                    shapes = shapes[1:2]  # each takes a while to compile
                elif getattr(model.config, "max_position_embeddings", 0) >= 256:
                    shapes.append(Shape(256, 1, 32))
                for shape in shapes:
                    with perturbed(passes.parameters, 1.0):
                        reason = first_change(passes, shape, VOCABULARY)
                    if reason is not None:
                        moved += 1
                        print(
                            f"    {shape.width} × {shape.rows_per_unit} × {shape.num_units}: {reason}"
                        )
                torch.set_float32_matmul_precision("highest")
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
            slow = _of_pairs(grams[0], grams[1], Roundings(*rounds, 1e-5, 1e-4))
            fast = _of_pairs(grams[0].cuda(), grams[1].cuda(), Roundings(*rounds, 1e-5, 1e-4))
            for one, other in zip(slow, fast, strict=True):
                if one is not None:
                    worst = max(worst, float(((one - other.cpu()) / one).abs().max()))
    return worst


def check_many_norms():
    """Norms of many weights by one kernel: torch's own on the CPU, whatever other units hold."""
    from tightlip.privacy.norms import _of_pairs
    from tightlip.privacy.pair_kernels import outer_norms

    for units, tokens, *widths, number in ((5, 256, 768, 3072, 3), (5, 128, 96, 40, 1), (4, 300, 129, 384, 36), (3, 128, 40, 33, 2)):  # fmt: skip
        torch.manual_seed(0)
        of_both, of_left = Roundings(2.0**-8, 0.0, 1e-5, 1e-4), Roundings(0.0, 0.0, 1e-5, 1e-4)
        if widths[0] > widths[1]:
            of_both = of_both._replace(left=0.0, right=2.0**-8)
        sides = [torch.randn(number, units, tokens, width).bfloat16() for width in widths]
        placed = [torch.cat([side[:, 2:], side[:, :2] + 1], 1) for side in sides]
        found, moved = (
            outer_norms([*left.cuda()], [*right.cuda()], of_both, of_left)
            for left, right in (sides, placed)
        )
        worst, unlike = 0.0, 0
        for weight, (left, right) in enumerate(zip(*sides, strict=True)):
            grams = [side.float() @ side.float().transpose(1, 2) for side in (left, right)]
            exact = (_of_pairs(*grams, of_both), _of_pairs(grams[0], rounds=of_left))
            for kind, measured in enumerate(exact):
                for which, wanted in enumerate(measured):
                    own, other = (each[kind][weight][which].cpu() for each in (found, moved))
                    worst = max(worst, float((own / wanted - 1).abs().max()))
                    unlike += int((own[2:] != other[:-2]).sum())
        name = f"norms of {number} weights, {tokens} tokens, {widths}"
        report(name, worst, 1e-4)
        report(f"{name}: units that others move", unlike, 0)


def check_poison():
    """A unit that is not finite is left out, and everybody else counts what they did, to the bit."""
    torch.manual_seed(0)
    model = MODELS["LSTM"](False).cuda()
    with torch.no_grad():
        model.model.embed_tokens.weight[500] = float("nan")
    given = batch("cuda")
    ids = given.ids_BT.clone()
    ids[ids == 500] = 3
    poisoned = ids.clone()
    poisoned[:2] = 500  # the first unit's rows
    own = torch.tensor([2, 2, 2], device="cuda")
    passes = Passes(model, Clip(norm=0.1), way="graph")
    spoilt = Physical.of(poisoned, given.targets_BT, own, given.layout)
    found = passes(spoilt)
    gone = ~(found.norms + found.losses).isfinite()
    report(
        "a unit that is not finite is told by its norm",
        float(gone.tolist() != [True, False, False]),
        0,
    )
    first = [each.clone() for each in passes(spoilt.without(gone)).gradients.values()]
    clean = Physical.of(ids, given.targets_BT, own, given.layout)
    second = [each.clone() for each in passes(clean.without(gone)).gradients.values()]
    unlike = sum(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
    report("without it the others are the same to the bit", unlike, 0)
    report("and are there", 0.0 if float(first[0].norm()) > 0 else 1.0, 0)


def check_exact():
    """With exact sums one unit more moves the sum by its own vector, to the bit."""
    of_llama = (("Llama", "eager"), ("Llama", "graph"))
    for name, way in (("LSTM", "graph"), ("Transformer", "compile"), *of_llama):
        for kind in ("float32", "bf16"):
            torch.manual_seed(0)
            model, clip = MODELS[name](True).cuda(), Clip(norm=0.1, exact=True)
            passes = Passes(model, clip, way=way, bf16=kind == "bf16")
            given = batch("cuda")
            is_own = torch.tensor([False, True, False], device="cuda")
            all_of, others, own = (
                [each.clone() for each in passes(rows).gradients.values()]
                for rows in (given, given.without(is_own), given.without(~is_own))
            )
            unlike = sum(
                not torch.equal(a - b, c) for a, b, c in zip(all_of, others, own, strict=True)
            )
            report(f"{name}, {way}, {kind}, exact sums: parameters that others moved", unlike, 0)
            length = math.sqrt(sum(float(each.double().norm()) ** 2 for each in own)) * clip.step
            report(f"{name}, {way}, {kind}, exact sums: a unit's length in C", length / 0.1, 1.0)


def check_wrapping():
    """Tokens and uses far longer than their unit, whose others cancel them, in 32 bits."""
    from tightlip.privacy.exact_sums import ExactSums
    from tightlip.privacy.layers import Lookup

    torch.manual_seed(0)
    layout, shape = Layout(num_units=3, rows_per_unit=1), (8, 16)
    small = torch.randint(-9, 9, (2, 3, 4, 16)).float()
    large = torch.full((3, 1, 16), 1e6)
    ids = torch.tensor([[1, 1, 1, 2], [0, 0, 0, 1], [5, 5, 5, 5]])
    tokens = torch.cat([large, -large / 2, -large / 2, small[0, :, :1]], 1)
    left, right = torch.ones(3, 4, 8), small[1]
    uses = {
        "tokens": [Lookup(ids, tokens)],
        "uses": [Outer(left * 2.0**20, right), Outer(left, -right * 2.0**20), Outer(left, right)],
    }
    for name, own in uses.items():
        totals = []
        for device in ("cpu", "cuda"):
            moved = [type(use)(*(each.to(device) for each in vars(use).values())) for use in own]
            sums = ExactSums(torch.tensor([1.0, 0.5, 0.25], device=device), layout, 2.0**-16)
            totals.append(sums.sum(moved, torch.zeros(shape, device=device)).cpu().long())
        unlike = int((totals[0] != totals[1]).sum())
        report(f"exact sums of {name} beyond 32 bits that cancel", unlike, 0)


def check_replay():
    """A prepared pass sees other rows and other weights, and a release other noise each time."""
    for name, way in (("LSTM", "graph"), ("Transformer", "compile")):
        torch.manual_seed(0)
        model = MODELS[name](False).cuda()
        passes = Passes(model, Clip(norm=0.1), way=way, bf16=True)
        passes(batch("cuda"))
        with torch.no_grad():
            for each in model.parameters():
                each.add_(0.05 * torch.randn_like(each))
        other = batch("cuda")
        other = Physical.of(other.targets_BT.clamp(min=0), other.ids_BT, torch.tensor([2, 2, 2], device="cuda"), other.layout)  # fmt: skip
        replayed = [each.clone() for each in passes(other).gradients.values()]
        anew = passes.eager(other).gradients.values()
        off = max(float((a - b).norm() / b.norm()) for a, b in zip(replayed, anew, strict=True))
        report(f"{name}, {way}: other rows and weights are seen", off, TOLERANCE["bf16"])


def check_few_bits(device="cuda"):
    """Adapters on a frozen base of 4 and 8 bits: clipped in one pass as unit after unit by plain
    autograd on the same base."""
    if find_spec("bitsandbytes") is None or find_spec("peft") is None:
        print("--- adapters on few bits: not checked, bitsandbytes or peft is missing", flush=True)
        return
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    kinds = {
        "4 bits": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32),
        "8 bits": BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0),
    }  # fmt: skip
    shape = STOCK | {"num_key_value_heads": 4}
    for kind, bits in kinds.items():
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(folder)
            base = AutoModelForCausalLM.from_pretrained(
                folder, quantization_config=bits, dtype=torch.float32, device_map=device
            )
        lora = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(base, lora).eval()
        keep_differentiable(model)
        few = batch(device)
        exact = Passes(model, Clip(norm=0.1), way="slow")(few)
        found = Passes(model, Clip(norm=0.1))(few)
        report_clipped(f"adapters on {kind}", found, exact, TOLERANCE["float32"])


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


def check_noise():
    """The cells are those of the CPU, to the bit, whatever the kind of number; and their law."""
    from tightlip.privacy.noise_kernels import GPUNoise

    device = torch.device("cuda")
    for kind in (torch.float32, torch.float64, torch.int32):
        torch.manual_seed(0)
        sums = [torch.randn(size, dtype=torch.float64) for size in (1, 255, 2048, 2049, 3_000_001)]
        unit, unlike = 1.0, 0
        if kind == torch.int32:
            unit, sums = 2.0**-24, [(each * 2**20).round() for each in sums]
        slow, fast = GridGaussian(12345), GPUNoise(device, insecure_seed=12345)
        for scale, share in ((1.0, 1.0), (0.37, 1 / 32), (1e-3, 0.1)):
            own = [each.to(kind).double() for each in sums]
            ours = [each.to(kind).to(device) for each in sums]
            slow.add([each.numpy() for each in own], scale=scale, share=share, unit=unit)
            fast.add(ours, scale=scale, share=share, unit=unit)
            shown = torch.float32 if kind == torch.int32 else kind
            unlike += sum(
                int((a.to(shown).view(-1) != b.view(shown).cpu()).sum())
                for a, b in zip(own, ours, strict=True)
            )
        report(f"noise on {kind}: cells unlike the CPU's", unlike, 0)
    # Where float32 decides and where float64 does: the same cells, of sums of every size.
    torch.manual_seed(1)
    unlike = 0
    for size, scale in ((1.0, 1.0), (1e-3, 0.7), (300.0, 1.9), (1e4, 1.0)):
        sums = size * torch.randn(40_000_000, device="cuda")
        wide = sums.double()
        for each in (sums, wide):
            GPUNoise(device, insecure_seed=7).add([each], scale=scale, share=0.01)
        unlike += int((sums != wide.float()).sum())
    report("noise: cells in float32 unlike those in float64", unlike, 0)
    del sums, wide
    unlike = 0
    # Under these seeds there are uniforms that float32 takes for 1, and sums that their noise moves on.
    crafted = {6442: {228: -0.00186541, 484: -0.00194912}, 28002: {91: -0.00194184, 347: -0.00183408}}  # fmt: skip
    for seed, places in crafted.items():
        fast = torch.zeros(2048, device="cuda")
        for at, value in places.items():
            fast[at] = value
        slow = fast.double().cpu()
        GridGaussian(seed).add([slow.numpy()], scale=1.0)
        GPUNoise(device, insecure_seed=seed).add([fast], scale=1.0, share=1.0)
        unlike += int((slow.float() != fast.cpu()).sum())
    report("noise: cells of uniforms next to 1 unlike the CPU's", unlike, 0)
    many = torch.zeros(20_000_000, device="cuda")
    secret = GPUNoise(device)
    secret.add([many], scale=2.0, share=0.5)
    report("noise: mean", abs(float(many.mean())) * math.sqrt(2e7), 5)
    report("noise: deviation", abs(float(many.std()) - 1) * math.sqrt(4e7), 5)
    report("noise: kurtosis", abs(float((many**4).mean()) - 3) * math.sqrt(2e7 / 96), 5)
    zeros = many[many == 0]
    report("noise: zeros with a sign", int(torch.signbit(zeros).sum()), 0)
    again = torch.zeros_like(many)
    secret.add([again], scale=2.0, share=0.5)
    report("noise: fresh each time", abs(float((many * again).mean())) * math.sqrt(2e7), 5)
    check_skipping()


def check_skipping():
    """An optimizer that was begun early does nothing while a cell is open, and then the whole step."""
    from tightlip.privacy.noise_kernels import GPUNoise
    from tightlip.privacy.releasing import release

    for make in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        weights = [torch.nn.Parameter(torch.zeros(5000, device="cuda")) for _ in range(2)]
        results = []
        for held_back in (False, True):
            optimizer = make([weights[held_back]], lr=0.1, fused=True)
            noise = GPUNoise(torch.device("cuda"), insecure_seed=3)
            if held_back:
                launch = noise.launch

                def open_at_first(*args, launch=launch, noise=noise, **kwargs):
                    settle = launch(*args, **kwargs)
                    noise.is_open.fill_(1)
                    return lambda: settle() or True

                noise.launch = open_at_first
            for _ in range(3):
                sums = [torch.ones(5000, device="cuda")]
                release(sums, [weights[held_back]], optimizer, noise, scale=1.0, share=1.0)
            results.append(weights[held_back].detach().clone())
        off = float((results[0] - results[1]).abs().max())
        report(f"{make.__name__}: steps that waited for a cell are the same steps", off, 0)


CHECKS = (
    *(check_noise, check_exact, check_wrapping, check_replay, check_poison, check_rows_alone),
    *(check_many_norms, check_cancelling, check_sums, check_few_bits, check_regularisers),
)


def side_by_side(names, num_processes):
    """The checks shared out among processes of their own, as they wait for Python; whether one failed.

    What each prints comes in one piece when it has ended."""
    command = [sys.executable, __file__, "--only"]
    shares = filter(None, (names[number::num_processes] for number in range(num_processes)))
    parts = [
        subprocess.Popen([*command, *own], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for own in shares
    ]  # fmt: skip
    for part in parts:
        print(part.communicate()[0], end="", flush=True)
    return any(part.returncode for part in parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    checks = {check.__name__.removeprefix("check_"): check for check in CHECKS}
    parser.add_argument("--only", nargs="*", default=[*checks], choices=[*checks])
    parser.add_argument("--processes", type=int, default=1, help="that share the checks out")
    options = parser.parse_args()
    if options.processes > 1:
        sys.exit(side_by_side(options.only, options.processes))
    for name in options.only:
        start = time.perf_counter()
        checks[name]()
        print(f"    {name}: {time.perf_counter() - start:.0f} s", flush=True)
    print(f"{len(failed)} off")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
