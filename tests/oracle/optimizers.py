"""The learning rate of each step, and the update of each weight."""

import math

import torch


def learning_rate(step, steps, settings):
    """Warmup, plateau, decay. ``step`` counts from 0; the decay would end one step after the last."""
    warmup = min(settings["lr_scheduler.warmup_steps"], steps)
    decay = steps - warmup
    if settings["lr_scheduler.decay_ratio"] is not None:
        decay = min(decay, round(steps * settings["lr_scheduler.decay_ratio"]))
    if step < warmup:
        return settings["optimizer.lr"] * (step + 1) / warmup
    progress = max(0, step - (steps - decay)) / max(1, decay)
    shapes = {
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
    }
    least = settings["lr_scheduler.min_lr_factor"]
    return settings["optimizer.lr"] * (least + (1 - least) * shapes[settings["lr_scheduler.decay_type"]])


def clipped(gradients, norm, max_norm):
    """The gradients, scaled so that their norm is at most ``max_norm``, as ``torch.nn.utils.clip_grad_norm_`` does."""
    if max_norm == 0:
        return gradients
    factor = min(1.0, max_norm / (norm + 1e-6))
    return {name: factor * gradient for name, gradient in gradients.items()}


class Optimizer:
    """AdamW (arXiv:1711.05101), and Muon (kellerjordan.github.io/posts/muon) for matrices where it is asked for."""

    def __init__(self, settings):
        self.settings = settings
        self.moments = {}
        self.step = 0

    def update(self, weights, gradients, lr):
        """The next weights."""
        self.step += 1
        found = dict(weights)
        for name, gradient in gradients.items():
            by_muon, lr_factor, weight_decay = self.treatment(name, weights[name])
            direction = self.muon(name, gradient) if by_muon else self.adam(name, gradient)
            kept = (1 - lr * lr_factor * weight_decay) * weights[name]
            found[name] = kept - lr * lr_factor * direction
        return found

    def treatment(self, name, weight):
        """Whether Muon updates a weight, the factor of its learning rate, and its weight decay."""
        is_matrix = weight.dim() == 2 and name.startswith("layers.") and ".router." not in name
        by_muon = self.settings["optimizer.name"] == "muon" and is_matrix
        lr_factor = 1.0
        weight_decay = self.settings["optimizer.weight_decay"]
        if name == "tok_embeddings.weight" and not self.settings["optimizer.decay_embeddings"]:
            weight_decay = 0.0
        if weight.dim() == 1 and not self.settings["optimizer.decay_1d"]:
            weight_decay = 0.0
        for group in self.settings["optimizer.param_groups"]:
            pattern, words = group.split(": ")
            if f".{pattern}." in f".{name}.":
                values = dict(word.split("=") for word in words.split())
                lr_factor = float(values.get("lr_factor", 1.0))
                weight_decay = float(values.get("weight_decay", weight_decay))
                by_muon = values.get("optimizer", "muon" if by_muon else "adamw") == "muon"
                break
        return by_muon, lr_factor, weight_decay

    def adam(self, name, gradient):
        """Both moments, each over its bias correction."""
        beta1 = self.settings["optimizer.beta1"]
        beta2 = self.settings["optimizer.beta2"]
        mean, mean_square = self.moments.get(name, (torch.zeros_like(gradient), torch.zeros_like(gradient)))
        mean = beta1 * mean + (1 - beta1) * gradient
        mean_square = beta2 * mean_square + (1 - beta2) * gradient.square()
        self.moments[name] = self.stored(mean, signed=True), self.stored(mean_square, signed=False)
        mean = mean / (1 - beta1**self.step)
        mean_square = mean_square / (1 - beta2**self.step)
        return mean / (mean_square.sqrt() + self.settings["optimizer.eps"])

    def muon(self, name, gradient):
        """The momentum, made orthogonal by five steps of Newton and Schulz."""
        decay = self.settings["optimizer.muon_momentum"]
        momentum = decay * self.moments.get(name, torch.zeros_like(gradient)) + (1 - decay) * gradient
        self.moments[name] = momentum
        if self.settings["optimizer.muon_nesterov"]:
            momentum = decay * momentum + (1 - decay) * gradient
        x = momentum / momentum.norm()
        for _ in range(5):
            square = x @ x.T
            x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
        rows, columns = x.shape
        if self.settings["optimizer.muon_adjust_lr"] == "original":
            return math.sqrt(max(1, rows / columns)) * x
        return 0.2 * math.sqrt(max(rows, columns)) * x

    def stored(self, moment, signed):
        """A moment as it is kept until the next step: as it is, or in 8 bits (arXiv:2110.02861)."""
        if self.settings["optimizer.state_dtype"] != "8bit" or moment.numel() < 4096:
            return moment
        flat = moment.flatten()
        blocks = torch.nn.functional.pad(flat, (0, -len(flat) % 256)).reshape(-1, 256)
        scale = blocks.abs().amax(1, keepdim=True)
        table = codes(signed)
        nearest = torch.bucketize(blocks / scale.clamp(min=1e-12), (table[1:] + table[:-1]) / 2)
        return (table[nearest] * scale).flatten()[: len(flat)].reshape(moment.shape)


def codes(signed):
    """The 256 numbers of dynamic 8-bit codes: 7 decades, each larger one with twice as many numbers; 0 and 1."""
    found = [0.0, 1.0]
    for exponent in range(7):
        count = 2**exponent if signed else 2 * 2**exponent
        for place in range(count):
            number = 10.0 ** (exponent - 6) * (0.1 + 0.9 * (place + 0.5) / count)
            found += [number, -number] if signed else [number]
    return torch.tensor(sorted(found), dtype=torch.float64)
