"""``crius generate``."""

from typing import Annotated, Literal

from cyclopts import Parameter

from crius.cli.app import STARTED, Json, app, need_torch


@app.command
def generate(
    source: Annotated[str, Parameter(help="A run folder, a checkpoint, or a folder of Hugging Face.")],
    *,
    prompt: Annotated[
        tuple[str, ...], Parameter(help="Text to continue; repeat it for several.", allow_leading_hyphen=True)
    ] = (),
    prompt_file: Annotated[
        str,
        Parameter(
            help="File with a prompt, a .jsonl file with one in each line, or - for standard input.",
            allow_leading_hyphen=True,
        ),
    ] = "",
    chat: Annotated[
        bool, Parameter(negative=(), help="A prompt is what a user says: it goes through the chat template.")
    ] = False,
    max_new_tokens: Annotated[int, Parameter(help="Most tokens of an answer.")] = 100,
    temperature: Annotated[float, Parameter(help="Divides the logits; 0 takes the most probable token.")] = 0.0,
    top_k: Annotated[int, Parameter(help="Draw from so many of the most probable tokens. 0: from all.")] = 0,
    top_p: Annotated[
        float, Parameter(help="Draw from the fewest tokens whose probabilities sum to this. 1: from all.")
    ] = 1.0,
    stop: Annotated[
        tuple[str, ...], Parameter(help="Text that ends an answer; repeat it for several.", allow_leading_hyphen=True)
    ] = (),
    seed: Annotated[int, Parameter(help="Of the draws.")] = 0,
    batch_size: Annotated[int, Parameter(help="Prompts that are continued together.")] = 8,
    device: Annotated[Literal["auto", "cpu", "cuda"], Parameter(help="Where to compute.")] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Parameter(help="Of weights and computation. auto: bfloat16 on a GPU, else float32."),
    ] = "auto",
    tensor_parallel: Annotated[
        int, Parameter(name="--parallelism.tensor_parallel_degree", help="Ranks here that share the model.")
    ] = 1,
    as_json: Json = False,
) -> int:
    """Continue prompts with a trained model, and print the text as it comes.

    With --json a line for each prompt: text, tokens, their log-probabilities, why it ended, and tokens per second.
    """
    from crius.tools.generate.settings import Settings, read_prompts

    settings = Settings(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop=stop,
        seed=seed,
        batch_size=batch_size,
        chat=chat,
        device=device,
        dtype=dtype,
        ranks=tensor_parallel,
    )
    settings.check()
    prompts = read_prompts(prompt, prompt_file)
    need_torch()
    if settings.ranks > 1:
        from crius.tools.generate.split import run_split

        return run_split(source, prompts, settings, STARTED, as_json=as_json)
    from crius.tools.generate.run import answer_all
    from crius.tools.generate.source import read_source

    answer_all(read_source(source, settings), prompts, settings, STARTED, as_json=as_json)
    return 0
