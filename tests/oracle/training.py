"""The loop: loss, gradients, clipping, update, validation."""

import math
from dataclasses import dataclass, field

import torch

from oracle.data import END_OF_DOCUMENT, NO_LABEL, sequences_of_step, spread, tensors
from oracle.model import Model
from oracle.optimizers import Optimizer, clipped, learning_rate


@dataclass
class Curve:
    """What a run reports of each step, and of its last validation."""

    loss: list = field(default_factory=list)
    grad_norm: list = field(default_factory=list)
    lr: list = field(default_factory=list)
    aux_loss: list = field(default_factory=list)
    val_loss: float = math.nan
    val_bits_per_byte: float = math.nan


def train(weights, sequences, held_out, settings):
    """Train on ``sequences``, whole global batches at a time. Returns the curve and the last weights.

    Args:
        weights: first weights by name.
        sequences: sequences of an epoch, before it is shuffled.
        held_out: sequences to score after the last step.
        settings: numbers by name.
    """
    weights = {name: weight.double() for name, weight in weights.items()}
    has_adapters = any(".lora_" in name for name in weights)
    trained = [name for name in weights if ".lora_" in name or not has_adapters]
    trained = [name for name in trained if not name.endswith(".router.bias")]
    steps = settings["training.steps"]
    if settings["training.epochs"] > 0:
        steps = math.ceil(settings["training.epochs"] * len(sequences) / settings["training.global_batch_size"])
    optimizer = Optimizer(settings)
    curve = Curve()
    for step in range(steps):
        leaves = {name: weights[name].requires_grad_(name in trained) for name in weights}
        model = Model(leaves, settings)
        inputs, labels, positions = tensors(sequences_of_step(step, sequences, settings))
        loss = summed_loss(model.logits(inputs, positions), labels) / (labels != NO_LABEL).sum()
        balance = model.balance_loss()
        found = torch.autograd.grad(loss + balance, [leaves[name] for name in trained])
        gradients = dict(zip(trained, found, strict=True))
        weights = {name: leaf.detach() for name, leaf in leaves.items()}
        norm = math.sqrt(sum(gradient.square().sum().item() for gradient in found))
        lr = learning_rate(step, steps, settings)
        weights = optimizer.update(weights, clipped(gradients, norm, settings["training.max_norm"]), lr)
        weights = balanced(weights, model, settings)
        curve.loss.append(loss.item())
        curve.grad_norm.append(norm)
        curve.lr.append(lr)
        curve.aux_loss.append(balance.item())
    if held_out:
        validate(weights, spread(held_out, settings["validation.num_samples"]), curve, settings)
    return curve, weights


def summed_loss(logits, labels):
    """Cross-entropy in nats, summed over the tokens with a label."""
    has_label = labels != NO_LABEL
    log_probability = logits[has_label].log_softmax(-1)
    return -log_probability.gather(1, labels[has_label][:, None]).sum()


def balanced(weights, model, settings):
    """Routers' biases after a step (arXiv:2408.15664): up for experts with fewer tokens than the mean, else down."""
    found = dict(weights)
    biases = [name for name in weights if name.endswith(".router.bias")]
    for name, (_, _, visits) in zip(biases, model.routings, strict=False):
        load = visits.sum((0, 1))
        found[name] = weights[name] + settings["moe.bias_update_rate"] * (load.mean() - load).sign()
    return found


def validate(weights, sequences, curve, settings):
    """Mean loss of a token, and bits per byte of text: the end of a document is a label without a byte."""
    inputs, labels, positions = tensors(sequences)
    with torch.no_grad():
        nats = summed_loss(Model(weights, settings).logits(inputs, positions), labels).item()
    num_bytes = ((labels != NO_LABEL) & (labels != END_OF_DOCUMENT)).sum().item()
    curve.val_loss = nats / (labels != NO_LABEL).sum().item()
    curve.val_bits_per_byte = nats / math.log(2) / num_bytes
