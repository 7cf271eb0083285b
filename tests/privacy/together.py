"""What one, two and three processes do with the same settings; results are left in files.

Run as a script: `python together.py FOLDER`, with one folder for each number of processes in it.
"""

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from forked import begin, end
from privacy.tiny_models import Chain
from tightlip.core.errors import GuaranteeError, UsageError
from tightlip.core.grid_gaussian import NotFinite
from tightlip.core.processes import Processes
from tightlip.privacy import PrivateTraining
from tightlip.privacy.adaptive import AdaptiveSpec

SEVERAL = (2, 3)
NUM_USERS, CLIP, NOISE = 12, 0.5, 4.0
UNTOUCHED = 3000  # rows of an embedding that nobody's text looks up
PLANNED = 40


def texts():
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 30, (40,), generator=draw).tolist()
    return [torch.randint(0, 20, (length,), generator=draw) for length in lengths]


def users():
    return [number % NUM_USERS for number in range(40)]


def chain(**sizes):
    """Of four and 23 rows: with three processes, one has none of some weights and fewer of others."""
    torch.manual_seed(0)
    return Chain(nn.Linear(4, 4), nn.LayerNorm(4), size=4, **sizes)


def with_lora():
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": 23, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**shape))
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))


def sharded(model):
    """Each layer by itself, as one is told to; one process alone keeps it whole."""
    if Processes.here().are_several:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (Processes.here().size,))
        layers = model.layers if hasattr(model, "layers") else model.get_base_model().model.layers
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def in_ddp(model):
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model)


def replicated(model):
    """Shards of which there are several replicas (HSDP)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (Processes.here().size, 1), mesh_dim_names=("copies", "shards"))
    return fully_shard(model, mesh=mesh)


def narrowed(model):
    """Weights that are gathered in bfloat16."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (Processes.here().size,))
    return fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def weights(model):
    return {name: whole(each) for name, each in model.named_parameters() if each.requires_grad}


def gradients(model):
    return {name: whole(each.grad) for name, each in model.named_parameters() if each.requires_grad}


def private(folder, name, model=None, **settings):
    model = chain() if model is None else model
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = settings.pop("optimizer", torch.optim.SGD)(trained, lr=0.5)
    given = {
        "documents": texts(), "users": users(), "noise_multiplier": 0.0, "clip_norm": CLIP, "steps": PLANNED,
        "expected_batch": 6, "insecure_seed": 7, "ledger": folder / name / "ledger.json",
        "widths": (32,), **settings,  # of which each is asked whether rows meet
    }  # fmt: skip
    return PrivateTraining(model, optimizer, **given)


def trained(folder, name, model=None, steps=2, **settings):
    """Some steps; what every process should agree on."""
    model = chain() if model is None else model
    training = private(folder, name, model, **settings)
    seen = [training.step() for _ in range(steps)]
    record = training.guarantee()
    training.close()
    return {
        "weights": weights(model), "loss": [float(each.loss) for each in seen],
        "num_targets": [each.num_targets for each in seen], "epsilon": record["epsilon"],
        "standing": record["standing"], "because": record["because"], "steps": training.ledger.steps,
        "promised": training.ledger.promised, "spent": training.ledger.epsilon,
    }  # fmt: skip


def released(folder, name, model, steps=1, **settings):
    """The gradients of some steps that are not applied, everybody drawn in each."""
    given = {"expected_batch": NUM_USERS, "rows_per_unit": 4, **settings}
    training = private(folder, name, model, **given)
    found = []
    for _ in range(steps):
        training.noisy_gradients()
        found.append(gradients(model))
    training.close()
    return found


class Silence:
    """Noise that hides nothing, but refuses what noise refuses."""

    def add(self, tensors, *, scale, share, unit=1.0):
        if not all(bool(each.isfinite().all()) for each in tensors):
            raise NotFinite("a hole")
        for each in tensors:
            each.mul_(share * unit)


def with_a_hole(folder, name, make):
    """One person's gradient is no number, and nothing wipes it from a pass' sum."""
    model = make(chain())
    training = private(folder, name, model, expected_batch=NUM_USERS, noise_multiplier=1.0)
    training._noise = Silence()
    training._passes.clip = replace(training.clip, wipes=False)
    with torch.no_grad():
        held, row = model.embed.weight, 19  # an id that some people wrote; padding is 0
        if hasattr(held, "to_local"):
            row -= Processes.here().rank * -(-len(held) // Processes.here().size)
            held = held.to_local()
        if 0 <= row < len(held):
            held[row] = float("inf")
    training.noisy_gradients()
    training.close()
    return {name: each for name, each in gradients(model).items() if not name.startswith("embed")}


def adaptive(folder, name, mode):
    model = chain()
    rho = np.random.default_rng(0).uniform(0.2, 1.0, 40)
    spec = AdaptiveSpec(mode=mode, least_weight=0.1)
    how = {"adaptive": spec, "weights": rho, "noise_multiplier": 1.0}
    result = trained(folder, name, model, **how)
    scales = folder / name / "noise_scales.jsonl"
    lines = scales.read_text().splitlines() if scales.exists() else []
    result["scales"] = [json.loads(line)["noise_multiplier"] for line in lines]
    return result


def refused(start):
    try:
        start()
    except (UsageError, GuaranteeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def refusals(folder):
    """What each process is told where they differ."""
    rank = Processes.here().rank
    another = [*texts()[:-1], texts()[-1] + rank]
    moved = chain()
    with torch.no_grad():
        moved.head.bias += rank
    based = with_lora()
    with torch.no_grad():  # as rows that every process drew for a new token
        based.get_input_embeddings().weight[-1] += rank
    starts = {
        "settings": lambda: private(folder, "refused-settings", noise_multiplier=float(rank)),
        "texts": lambda: private(folder, "refused-texts", documents=another),
        "people": lambda: private(
            folder, "refused-people", users=[(each + rank) % 7 for each in users()]
        ),
        "weights": lambda: private(folder, "refused-weights", moved),
        "base": lambda: private(folder, "refused-base", based),
    }
    if Processes.here().are_several:
        starts["way"] = lambda: private(folder, "refused-way", sharded(chain()), way="mapped")
        starts["wrapped"] = lambda: private(folder, "refused-wrapped", in_ddp(chain()))
        starts["replicas"] = lambda: private(folder, "refused-replicas", replicated(chain()))
        starts["narrow"] = lambda: private(folder, "refused-narrow", narrowed(chain()))
    return {name: refused(start) for name, start in starts.items()}


def drifted(folder):
    model = chain()
    training = private(folder, "drifted", model, noise_multiplier=1.0)
    training.step()
    with torch.no_grad():
        model.head.bias += Processes.here().rank
    record = training.guarantee()
    return {
        "standing": record["standing"],
        "because": record["because"],
        "epsilon": record["epsilon"],
    }


def elsewhere(folder):
    """Every process names another file; only the first one's may be there afterwards."""
    rank = Processes.here().rank
    return trained(folder, f"ledger-of-{rank}", noise_multiplier=1.0)


def wide():
    torch.manual_seed(0)
    model = Chain(size=4)
    model.embed = nn.Embedding(20 + UNTOUCHED, 4)
    return model


def scenarios(folder):
    exact, adam = {"exact_sums": True}, {"optimizer": torch.optim.AdamW}
    noisy = {"noise_multiplier": NOISE, "insecure_seed": None}
    few = {
        "documents": [torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6, 7])],
        "users": None,
        "expected_batch": 2,
    }
    nobody = {"expected_batch": 0.01, "noise_multiplier": 1.0}  # with this seed
    return {
        "floats": lambda name: trained(folder, name),
        "exact": lambda name: trained(folder, name, widths=(), **exact, **adam),
        "sharded-exact": lambda name: trained(folder, name, sharded(chain()), **exact),
        "few": lambda name: trained(folder, name, **few, **exact),
        "sharded-few": lambda name: trained(folder, name, sharded(chain()), **few, **exact),
        "sum": lambda name: released(folder, name, chain()),
        "sharded-sum": lambda name: released(folder, name, sharded(chain())),
        "noise": lambda name: released(folder, name, wide(), steps=2, **noisy),
        "sharded-noise": lambda name: released(folder, name, sharded(wide()), steps=2, **noisy),
        "exact-noise": lambda name: released(folder, name, wide(), **noisy, **exact),
        "seeded-noise": lambda name: released(folder, name, wide(), noise_multiplier=NOISE),
        "hole": lambda name: with_a_hole(folder, name, lambda model: model),
        "sharded-hole": lambda name: with_a_hole(folder, name, sharded),
        "refusals": lambda name: refusals(folder),
    } | ({} if Processes.here().size == 3 else {
        "sharded-lora": lambda name: trained(folder, name, sharded(with_lora()), **exact),
        "lora": lambda name: trained(folder, name, with_lora(), **exact),
        "slow": lambda name: trained(folder, name, way="slow", per_layer=True, **exact),
        "bf16": lambda name: trained(folder, name, bf16=True, **exact),
        "nobody": lambda name: trained(folder, name, **nobody),
        "epsilon": lambda name: trained(folder, name, noise_multiplier=None, epsilon=8.0, insecure_seed=None),
        **{mode: lambda name, mode=mode: adaptive(folder, name, mode) for mode in ("scale", "as-published", "clip")},
        "drifted": lambda name: drifted(folder),
        "elsewhere": lambda name: elsewhere(folder),
    })  # fmt: skip


def do_all(folder):
    rank = Processes.here().rank
    for name, run in scenarios(folder).items():
        torch.save(run(name), folder / f"{name}-{rank}.pt")


def to_be_killed(folder):
    """Train to the end of the plan, and note every step that is applied."""
    training = private(folder.parent, "killed", noise_multiplier=1.0, insecure_seed=None)
    noted = os.open(folder / f"applied-{Processes.here().rank}", os.O_CREAT | os.O_WRONLY)
    while training.has_budget():
        training.step()
        os.write(noted, b".")
        time.sleep(0.01)
    training.guarantee()


def kill(folder):
    """Kill one of two, and then one of three, that go on with the same ledger; then let one end it."""
    for number, (size, dies) in enumerate(((2, 1), (3, 0))):
        life = folder / f"life-{number}"
        pids = begin(size, to_be_killed, life)
        applied = life / "applied-0"
        while not applied.exists() or len(applied.read_bytes()) < 3 + number:
            time.sleep(0.005)
        os.kill(pids[dies], signal.SIGKILL)
        (life / "statuses.json").write_text(json.dumps(end(pids)))
        (life / "ledger.json").write_bytes((folder / "killed" / "ledger.json").read_bytes())
    last = folder / "life-2"
    (folder / "statuses.json").write_text(json.dumps(end(begin(1, to_be_killed, last))))


def main(folder):
    torch.set_num_threads(1)
    (folder / "1").mkdir()
    do_all(folder / "1")  # here, so that the others know each ε that it worked out
    for size in SEVERAL:
        end(begin(size, do_all, folder / str(size)))
    kill(folder / "kills")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
