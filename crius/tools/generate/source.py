"""The model that answers: its weights on this process's device, its tokenizer, and the tokens that end an answer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from crius.checkpoint.pieces import TensorSource
from crius.checkpoint.plain import load_whole
from crius.errors import EnvironmentError
from crius.host import free_host_bytes
from crius.interop.kept import EOS_ID, GENERATION, ids_of
from crius.interop.weights import Weights
from crius.kernels import choice
from crius.kernels.cpu.linear import store_by_columns
from crius.models import registry
from crius.models.decoder import Decoder
from crius.models.description import ModelDescription
from crius.models.layers import Linear
from crius.named import all_state
from crius.parallel.allocate import allocate
from crius.parallel.runtime import pick_device
from crius.tokens.renderer import render_chats
from crius.tokens.template import END_OF_TURN, special_tokens
from crius.tokens.tokenizer import Tokenizer
from crius.tools.generate.settings import Message, Prompt, Settings
from crius.units import GIB

Split = Callable[[Decoder, ModelDescription], None]
Load = Callable[[Mapping[str, TensorSource], dict[str, Tensor]], None]


@dataclass(frozen=True)
class Source:
    """A model and its tokenizer.

    Attributes:
        weights: weights that the model was read from.
        model: model with this rank's part of the weights.
        facts: description of the model.
        tokenizer: tokenizer of its ids.
        ends: ids that end an answer.
        chat_template: chat template of the tokenizer; empty if it has none.
        special: special tokens by the names that a template uses, such as ``bos_token``.
        ranks: ranks that share the model.
    """

    weights: Weights
    model: Decoder
    facts: ModelDescription
    tokenizer: Tokenizer
    ends: frozenset[int]
    chat_template: str
    special: dict[str, str]
    ranks: int

    def encode(self, prompt: Prompt, *, chat: bool) -> list[int]:
        """Ids of a prompt, at least one: an empty prompt is the token that begins a document.

        Raises:
            DataError: the prompt cannot be encoded, or its chat template cannot be rendered.
        """
        if chat:
            return next(self.encode_chats([prompt.messages]))
        tokenizer = self.tokenizer
        ids = [int(i) for i in tokenizer.encode(prompt.text)]
        if tokenizer.bos_id is not None and (tokenizer.adds_bos or not ids):
            return [tokenizer.bos_id, *ids]
        return ids or [tokenizer.eos_id]

    def encode_chats(self, chats: Sequence[Sequence[Message]]) -> Iterator[list[int]]:
        """Ids of each conversation up to the answer of the assistant, at least one.

        Raises:
            DataError: see ``encode``.
        """
        for text in render_chats(self.chat_template, chats, self.special, is_dated=True):
            yield [int(i) for i in self.tokenizer.encode_marked(text)] or [self.tokenizer.eos_id]

    def check_room(self, batch: int, tokens: int) -> None:
        """Check that the keys and values of a batch fit into memory.

        Raises:
            EnvironmentError: they do not.
        """
        config = self.facts.config
        weight = self.model.tok_embeddings.weight
        heads = max(1, config.num_kv_heads // self.ranks)
        needed = 2 * config.num_layers * batch * tokens * heads * config.head_dim * weight.element_size()
        free = torch.cuda.mem_get_info()[0] if weight.is_cuda else free_host_bytes()
        if needed > free:
            raise EnvironmentError(
                f"keys and values of {batch} x {tokens:,} tokens take {needed / GIB:,.1f} GiB.",
                why=f"{free / GIB:,.1f} GiB are free",
                fix="a smaller --max_new_tokens or --batch_size",
            )


def read_source(
    weights: Weights,
    settings: Settings,
    local_rank: int = 0,
    split: Split = lambda model, facts: None,
    load: Load = load_whole,
    linear: Literal["auto", "torch"] = "auto",
) -> Source:
    """The model of a run folder, a checkpoint or a Hugging Face folder, with its tokenizer.

    Args:
        weights: weights of the source, which can answer with ``settings`` (``crius.tools.generate.checked``).
        settings: settings that were checked.
        local_rank: local rank of this process.
        split: keeps only this rank's part of the model, before it takes memory.
        load: fills that part.
        linear: kernel of linear layers, as in ``[kernels]``.

    Raises:
        CriusError: the model cannot be read.
    """
    facts = weights.facts
    tokenizer = weights.text_tokenizer
    device = pick_device(settings.device, local_rank, flag="--device")
    choose_kernels(device, linear)
    model = build_decoder(weights, settings.dtype, device, split, load)
    if settings.ranks == 1:
        store_by_columns(module.weight for module in model.modules() if isinstance(module, Linear))
    special, ends = _words(weights, tokenizer)
    return Source(weights, model, facts, tokenizer, ends, weights.chat_template, special, settings.ranks)


class _Undrawn(TorchFunctionMode):
    """Modules that are built in this context draw no weights: on the meta device the first draw imports torch's
    compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"] if kwargs else args[0]
        return func(*args, **(kwargs or {}))


def build_decoder(
    weights: Weights,
    dtype: str,
    device: torch.device,
    split: Split = lambda model, facts: None,
    load: Load = load_whole,
) -> Decoder:
    """The model of ``weights``, without gradients; ``dtype`` auto: bfloat16 on a GPU, else float32.

    Args:
        weights: opened weights.
        dtype: torch's name of a dtype, or auto.
        device: gets the weights.
        split: leaves this rank its part of the model, before it takes memory.
        load: fills that part.

    Raises:
        CriusError: the weights cannot be read.
    """
    auto = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device("meta"), _Undrawn():
        model = registry.build(weights.facts).to(auto if dtype == "auto" else getattr(torch, dtype))
    model.requires_grad_(False)
    split(model, weights.facts)
    allocate(model, device)
    load(weights.tensors, dict(all_state([model])))
    return model


def _words(weights: Weights, tokenizer: Tokenizer) -> tuple[dict[str, str], frozenset[int]]:
    """Special tokens by their names in templates, and ids that end an answer."""
    special = special_tokens(weights.tokenizer) if weights.tokenizer != "byte" else {}
    ends = {*ids_of(weights.said.get(GENERATION, {}).get(EOS_ID))}
    ends |= tokenizer.special_ids([*END_OF_TURN, special.get("eos_token", "")])
    return special, frozenset({tokenizer.eos_id, *ends})


def choose_kernels(device: torch.device, linear: Literal["auto", "torch"]) -> None:
    """Choose torch's own pointwise kernels: the others save memory only for a backward, which is never called here."""
    on_gpu = device.type == "cuda"
    choice.apply(
        choice.resolve(
            linear,
            "torch",
            "auto",
            device_type=device.type,
            capability=torch.cuda.get_device_capability(device) if on_gpu else None,
            cudnn=torch.backends.cudnn.version() if on_gpu else None,
        )
    )
