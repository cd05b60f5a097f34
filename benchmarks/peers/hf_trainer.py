"""Hugging Face: ``LlamaForCausalLM`` and ``Trainer``, with everything off that is not a training step."""

import os
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TRANSFORMERS_VERBOSITY="error")

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from benchmarks.contestant import Turns
from benchmarks.peers.task import BETAS, EPS, LR, MAX_NORM, WEIGHT_DECAY, Task, read_arguments, turns_of

Row = dict[str, Tensor]


class Windows(torch.utils.data.Dataset):
    """All rows of all batches, in order. Labels are shifted here, so that the model drops no token."""

    def __init__(self, task: Task) -> None:
        self._rows = task.windows().reshape(-1, task.seq_len + 1)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        row = torch.from_numpy(self._rows[index].astype(np.int64))
        return {"input_ids": row[:-1], "labels": row[:-1], "shift_labels": row[1:]}


def collate(rows: list[Row]) -> Row:
    """Stack rows to a batch."""
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


class Peer(Trainer):
    """The Trainer, with the order of the rows left alone; keeps the loss of each step."""

    loss: Tensor

    def _get_train_sampler(self, *arguments: object, **options: object) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def training_step(self, *arguments: object, **options: object) -> Tensor:
        """As the Trainer's."""
        self.loss = super().training_step(*arguments, **options)
        return self.loss


class Marks(TrainerCallback):
    """Counts the steps, and ends the training when the driver says so."""

    trainer: Peer

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_step_end(self, args: object, state: object, control: object, **rest: object) -> None:
        """Called after each update."""
        if not self._turns.after_step(self.trainer.loss.detach()):
            control.should_training_stop = True


def build(task: Task) -> LlamaForCausalLM:
    """The model with the first weights of the task."""
    config = LlamaConfig(
        vocab_size=task.vocab_size,
        hidden_size=task.dim,
        intermediate_size=task.ffn_dim,
        num_hidden_layers=task.num_layers,
        num_attention_heads=task.num_heads,
        num_key_value_heads=task.num_kv_heads,
        max_position_embeddings=task.seq_len,
        rms_norm_eps=task.norm_eps,
        rope_theta=task.rope_theta,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(task.first_weights())
    return model


def main() -> None:
    """Train until the driver says that it is over."""
    task, is_compiled = read_arguments("hf_trainer")
    model = build(task)
    marks = Marks(turns_of(task, transformers=transformers.__version__))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=task.steps,
            per_device_train_batch_size=task.batch,
            optim="adamw_torch_fused",
            learning_rate=LR,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_epsilon=EPS,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=MAX_NORM,
            lr_scheduler_type="constant",
            torch_compile=is_compiled,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            logging_nan_inf_filter=False,
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        trainer = Peer(
            model=model, args=arguments, train_dataset=Windows(task), data_collator=collate, callbacks=[marks]
        )
        marks.trainer = trainer
        trainer.remove_callback(PrinterCallback)
        trainer.train()


if __name__ == "__main__":
    main()
