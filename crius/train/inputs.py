"""What a run needs before torch: sizes of the model and the corpus. Torch-free, so that bad data shows at once."""

from dataclasses import replace

from crius.config.batch import BatchSizes, batch_sizes
from crius.config.pipeline import microbatch_unit, settle_stages
from crius.config.run import RunConfig
from crius.data.corpus import Corpus, open_corpus
from crius.models.registry import SPECS
from crius.models.spec import ModelFacts, ModuleFacts


def model_facts(config: RunConfig) -> ModelFacts:
    """The flavor of ``config``, with the sizes that it overrides."""
    spec = SPECS[config.model.name]
    asked = {name: getattr(config.model, name) for name in ("vocab_size", "num_layers", "num_kv_heads")}
    sizes = {name: value for name, value in asked.items() if value != -1}
    return spec.customize(spec.flavors[config.model.flavor], attention_mask=config.model.attention_mask, **sizes)


def known_model_facts(config: RunConfig) -> ModelFacts | None:
    """``model_facts``, or None where there is no such model or flavor."""
    spec = SPECS.get(config.model.name)
    return model_facts(config) if spec and config.model.flavor in spec.flavors else None


def settled(config: RunConfig) -> RunConfig:
    """``config`` with what it leaves to the size of the model decided: the stages of a pipeline rank."""
    facts = known_model_facts(config)
    return replace(config, parallelism=settle_stages(config.parallelism, facts.num_layers)) if facts else config


def run_batch_sizes(config: RunConfig, data_parallel_ranks: int) -> BatchSizes:
    """Sizes of the batch of ``config``, whose microbatches suit its pipeline."""
    return batch_sizes(config.training, data_parallel_ranks, microbatch_unit(config.parallelism))


def run_modules(config: RunConfig, facts: ModelFacts) -> list[ModuleFacts]:
    """The modules that pipeline stages are made of, weighed at the sequence length of ``config``."""
    return facts.modules((config.training.seq_len + 1) / 2)


def open_run_corpus(config: RunConfig, data_parallel_ranks: int) -> Corpus:
    """The corpus of ``config``; tokenised the first time, at hand in milliseconds later.

    Raises:
        DataError: it cannot be used.
    """
    return open_corpus(
        config.data,
        config.tokenizer,
        config.validation,
        seq_len=config.training.seq_len,
        global_batch_size=run_batch_sizes(config, data_parallel_ranks).total,
        vocab_size=model_facts(config).vocab_size,
        seed=config.debug.seed,
    )
