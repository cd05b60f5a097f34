"""A decoder as functions of its weights: Llama 3, Qwen3, and both with experts.

B sequences, T tokens, D model dim, N query heads, K key/value heads, H head dim, F hidden dim, E experts, V vocabulary
"""

import math

import torch


class Model:
    """The computation of one batch.

    Args:
        weights: tensors by name, float64.
        settings: numbers by name.
    """

    def __init__(self, weights, settings):
        self.weights = weights
        self.settings = settings
        self.routings = []
        """Of each layer with experts: logits and scores ``(B, T, E)``, and how often a token chose an expert, 0 or 1"""

    def logits(self, inputs, positions):
        """``(B, T, V)``. The document mask hides other documents; position 0 starts a document."""
        if self.settings["model.attention_mask"] == "causal":
            positions = torch.arange(inputs.shape[1]).expand_as(inputs)
        document = (positions == 0).cumsum(1)
        is_earlier = torch.ones(inputs.shape[1], inputs.shape[1], dtype=torch.bool).tril()
        visible = is_earlier & (document[:, :, None] == document[:, None, :])
        x = self.weights["tok_embeddings.weight"][inputs]
        for number in range(self.settings["model.num_layers"]):
            layer = f"layers.{number}"
            x = x + self.attention(f"{layer}.attention", self.norm(f"{layer}.attention_norm", x), positions, visible)
            x = x + self.feed_forward(f"{layer}.feed_forward", self.norm(f"{layer}.ffn_norm", x))
        tied = self.settings["model.tied_embeddings"]
        output = self.weights["tok_embeddings.weight" if tied else "output.weight"]
        return self.norm("norm", x) @ output.T

    def linear(self, name, x):
        """``W x``, and with an adapter ``W x + scale * B A x``."""
        y = x @ self.weights[f"{name}.weight"].T
        if f"{name}.lora_A" in self.weights:
            adapted = x @ self.weights[f"{name}.lora_A"].T @ self.weights[f"{name}.lora_B"].T
            y = y + adapter_scale(self.settings) * adapted
        return y

    def norm(self, name, x):
        """RMSNorm over the last dim."""
        mean_square = x.square().mean(-1, keepdim=True)
        return x / torch.sqrt(mean_square + self.settings["model.norm_eps"]) * self.weights[f"{name}.weight"]

    def attention(self, name, x, positions, visible):
        """Grouped-query attention: several query heads share a key and a value head."""
        head_dim = self.settings["model.head_dim"]
        query = self.linear(f"{name}.wq", x).unflatten(-1, (-1, head_dim))
        key = self.linear(f"{name}.wk", x).unflatten(-1, (-1, head_dim))
        value = self.linear(f"{name}.wv", x).unflatten(-1, (-1, head_dim))
        if f"{name}.q_norm.weight" in self.weights:
            query = self.norm(f"{name}.q_norm", query)
            key = self.norm(f"{name}.k_norm", key)
        query = rotated(query, positions, self.settings["model.rope_theta"])
        key = rotated(key, positions, self.settings["model.rope_theta"])
        group = query.shape[2] // key.shape[2]
        key = key.repeat_interleave(group, dim=2)
        value = value.repeat_interleave(group, dim=2)
        scores = torch.einsum("bqnh,bknh->bnqk", query, key) / math.sqrt(head_dim)
        shares = scores.masked_fill(~visible[:, None], -math.inf).softmax(-1)
        return self.linear(f"{name}.wo", torch.einsum("bnqk,bknh->bqnh", shares, value).flatten(2))

    def feed_forward(self, name, x):
        """SwiGLU, or experts that each are a SwiGLU."""
        if f"{name}.router.weight" in self.weights:
            return self.experts(name, x)
        gate = torch.nn.functional.silu(self.linear(f"{name}.w1", x))
        return self.linear(f"{name}.w2", gate * self.linear(f"{name}.w3", x))

    def experts(self, name, x):
        """Each token visits the experts with the highest scores, whose outputs are weighted by the scores."""
        logits = x @ self.weights[f"{name}.router.weight"].T
        is_softmax = self.settings["score"] == "softmax"
        scores = logits.softmax(-1) if is_softmax else logits.sigmoid()
        chosen = self.choice(name, scores.detach()).topk(self.settings["model.top_k"], dim=-1).indices
        visits = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        shares = scores if is_softmax else scores / scores.sum(-1, keepdim=True)
        self.routings.append((logits, shares, visits))
        weights = scores * visits
        weights = weights / weights.sum(-1, keepdim=True) * self.settings["route_scale"]
        w1 = self.weights[f"{name}.experts.w1"]
        w2 = self.weights[f"{name}.experts.w2"]
        w3 = self.weights[f"{name}.experts.w3"]
        gate = torch.nn.functional.silu(torch.einsum("btd,efd->btef", x, w1))
        hidden = gate * torch.einsum("btd,efd->btef", x, w3)
        y = torch.einsum("bte,btef,edf->btd", weights, hidden, w2)
        return y + self.feed_forward(f"{name}.shared", x) if f"{name}.shared.w1.weight" in self.weights else y

    def choice(self, name, scores):
        """What experts are chosen by: the scores, a bias that evens the load, and only the best groups of experts."""
        scores = scores + self.weights.get(f"{name}.router.bias", 0.0)
        if self.settings["num_groups"] == 1:
            return scores
        groups = scores.unflatten(-1, (self.settings["num_groups"], -1))
        best = groups.topk(2, dim=-1).values.sum(-1).topk(self.settings["top_groups"], dim=-1).indices
        is_best = torch.zeros(groups.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
        return groups.masked_fill(~is_best[..., None], -math.inf).flatten(-2)

    def balance_loss(self):
        """The balance losses of DeepSeek-V3 (arXiv:2412.19437, equations 17 to 20) and ST-MoE (arXiv:2202.08906)."""
        sequences = self.settings["training.global_batch_size"]
        tokens = sequences * self.settings["training.seq_len"]
        loss = torch.zeros((), dtype=torch.float64)
        for logits, shares, visits in self.routings:
            num_experts = logits.shape[-1]
            load = visits.mean(1) * num_experts / self.settings["model.top_k"]  # of each sequence; 1: even
            balance = (load * shares.mean(1)).sum()
            z = logits.logsumexp(-1).square().sum()
            loss = loss + self.settings["moe.aux_loss_coefficient"] * balance / sequences
            loss = loss + self.settings["moe.z_loss_coefficient"] * z / tokens
        return loss


def rotated(x, positions, theta):
    """Rotary positions (arXiv:2104.09864): number i of the first half of a head and of the second half are a pair."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions[..., None, None] * frequency
    first = x[..., :half]
    second = x[..., half:]
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), dim=-1)


def adapter_scale(settings):
    """LoRA's scale (arXiv:2106.09685), or rsLoRA's (arXiv:2312.03732)."""
    rank = settings["lora.rank"]
    return settings["lora.alpha"] / (math.sqrt(rank) if settings["lora.rslora"] else rank)
