"""A private SFTTrainer as each of several processes runs it; results are left in a folder.

torchrun --nproc-per-node 2 together.py FOLDER
"""

import gc
import os
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState
from transformers import TrainerCallback

from tightlip.trainer import PrivacySpec
from trainer.private_runs import private_sft, small

QUIET = {"noise_multiplier": 0.0, "insecure_seed": 7}
SHARDED = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}}  # fmt: skip


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **rest):
        control.should_training_stop = state.global_step >= self.step


def trainer(folder, num_processes, *, full=False, stop_at=None, privacy=QUIET, **changes):
    """Eight people a step, however many processes they are dealt to."""
    given = {"exact_sums": True} | ({"peft_config": None} if full else {})
    return private_sft(
        folder, model=small(num_hidden_layers=2), privacy=PrivacySpec(**privacy), given=given,
        callbacks=[] if stop_at is None else [StopAt(stop_at)], per_device_train_batch_size=2,
        gradient_accumulation_steps=4 // num_processes, save_strategy="steps", save_steps=2, **{"max_steps": 4, **changes},
    )  # fmt: skip


def weights(model):
    kept = {name: each for name, each in model.named_parameters() if each.requires_grad}
    return {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).detach().clone()
        for name, each in kept.items()
    }


def trained(folder, num_processes, *, resumes=False, **how):
    made = trainer(folder, num_processes, **how)
    done = made.train(resume_from_checkpoint=True if resumes else None)
    made.save_model()
    return {
        "weights": weights(made.model), "metrics": done.metrics, "step": done.global_step,
        "expected_batch": made.expected_batch, "wrapped": type(made.model_wrapped).__name__,
        "history": made.state.log_history,
    }  # fmt: skip


def scenarios(folder, num_processes):
    """Each once, in this order: some go on from what others left."""

    def run(name, **how):
        return lambda: trained(folder / name, num_processes, **how)

    noisy, short = {"privacy": {"noise_multiplier": 1.0}}, {"max_steps": 2}
    alone = num_processes == 1
    return {
        "quiet": run("quiet", **short),
        "begun": run("gone-on", stop_at=2, **noisy),
        "gone-on": run("gone-on", resumes=True, **noisy),
        "full": run("full", full=True, **short, **({} if alone else SHARDED)),
    } | ({} if alone else {
        "sharded-begun": run("sharded", stop_at=2, **noisy, **SHARDED),
        "sharded": run("sharded", resumes=True, **noisy, **SHARDED),
    })  # fmt: skip


def shard_on_cpus():
    """Let accelerate do on CPUs what it does on GPUs where FSDP is asked for, rather than nothing."""
    plain = AcceleratorState.__init__

    def asked(self, *given, fsdp_plugin=None, **rest):
        plain(self, *given, fsdp_plugin=fsdp_plugin, **rest)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = asked


def main(folder):
    torch.set_num_threads(1)
    gc.freeze()  # a trainer goes through everything for what is no longer used
    shard_on_cpus()
    for name, run in scenarios(folder, int(os.environ["WORLD_SIZE"])).items():
        torch.save(run(), folder / f"{name}-{os.environ['RANK']}.pt")
        AcceleratorState._reset_state()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # DTensors keep threads of torch, which would die with the interpreter, at times with an abort.
    os._exit(0)
