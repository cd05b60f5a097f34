"""TRL: ``SFTTrainer`` on conversations, all weights or adapters of PEFT, with all off that is no training step.

TRL makes tokens and labels of the texts itself, and writes them where the driver can compare them with those of Crius.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TRANSFORMERS_VERBOSITY="error")

import peft
import torch
import transformers
import trl
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.trainer_callback import PrinterCallback

from benchmarks.peers.task import SftTask, turns_of


class Peer(trl.SFTTrainer):
    """The trainer, with the order of the rows left alone; keeps the loss of each step."""

    loss: Tensor

    def _get_train_sampler(self, *arguments: object, **options: object) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def training_step(self, *arguments: object, **options: object) -> Tensor:
        """As the trainer's."""
        self.loss = super().training_step(*arguments, **options)
        return self.loss


class Marks(TrainerCallback):
    """Counts the steps, and ends the training when the driver says so."""

    trainer: Peer

    def __init__(self, task: SftTask) -> None:
        versions = {module.__name__: module.__version__ for module in (transformers, trl, peft)}
        self._turns = turns_of(task, **versions)

    def on_step_end(self, args: object, state: object, control: Any, **rest: object) -> None:
        """Called after each update."""
        if not self._turns.after_step(self.trainer.loss.detach()):
            control.should_training_stop = True


def conversations(rows: Iterable[str]) -> Dataset:
    """Lines of JSON as TRL's conversational prompts and completions."""
    parsed = [json.loads(row) for row in rows]
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": row["prompt"]}],
                "completion": [{"role": "assistant", "content": row["completion"]}],
            }
            for row in parsed
        ]
    )


def build(task: SftTask) -> torch.nn.Module:
    """The model with the first weights of the task, and its adapters if there are any."""
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32, attn_implementation="sdpa")
    return peft.PeftModel.from_pretrained(model, task.adapters, is_trainable=True) if task.adapters else model


def main() -> None:
    """Train until the driver says that it is over."""
    parser = argparse.ArgumentParser("trl_sft")
    parser.add_argument("task", type=Path, help="JSON with the fields of SftTask")
    task = SftTask(**json.loads(parser.parse_args().task.read_text()))
    marks = Marks(task)
    with tempfile.TemporaryDirectory() as folder:
        arguments = trl.SFTConfig(
            output_dir=folder,
            max_steps=task.steps,
            per_device_train_batch_size=task.batch,
            max_length=task.seq_len,
            pad_to_multiple_of=task.seq_len,
            gradient_checkpointing=False,
            bf16=False,
            optim="adamw_torch_fused",
            learning_rate=task.lr,
            adam_beta1=task.betas[0],
            adam_beta2=task.betas[1],
            adam_epsilon=1e-8,
            weight_decay=0.0,
            max_grad_norm=task.max_norm,
            lr_scheduler_type="constant",
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            logging_nan_inf_filter=False,
            disable_tqdm=True,
        )
        trainer = Peer(
            model=build(task),
            args=arguments,
            train_dataset=conversations(Path(task.rows).read_text(encoding="utf-8").splitlines()),
            processing_class=AutoTokenizer.from_pretrained(task.model),
            callbacks=[marks],
        )
        made = [[row["input_ids"], row["labels"]] for row in trainer.train_dataset]
        Path(task.prepared).write_text(json.dumps(made), encoding="utf-8")
        marks.trainer = trainer
        trainer.remove_callback(PrinterCallback)
        trainer.train()


if __name__ == "__main__":
    main()
