"""ChatML for a base model without a chat template. No torch."""

import json
import shutil
from pathlib import Path

from crius.interop.weights import open_weights
from crius.tokens.files import TEMPLATE, TOKENIZER, TOKENIZER_CONFIG
from crius.tokens.template import folder_of, read_object
from crius.tools.convert.new_folder import new_folder
from crius.tools.tune.choices import Choices

START = "<|im_start|>"
END = "<|im_end|>"
CHATML = (
    f"{{% for message in messages %}}{{{{ '{START}' + message['role'] + '\\n' + message['content'] + '{END}\\n' }}}}"
    f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '{START}assistant\\n' }}}}{{% endif %}}"
)


def choose_template(model: str, place: Path, chosen: Choices) -> list[str]:
    """Choose a tokenizer with ChatML, written to ``place``, if a model has a tokenizer.json, but no chat template.

    Returns:
        The tokens that its tokenizer lacked.
    """
    weights = open_weights(model)
    if "tokenizer.path" in chosen.given or weights.chat_template or weights.tokenizer in ("", "byte"):
        return []
    shutil.rmtree(place, ignore_errors=True)
    added = write_chatml(weights.tokenizer, place)
    with_ids = f"; {' and '.join(added)} are new ids" if added else ""
    chosen.take("tokenizer.path", place, f"the base has no chat template: ChatML{with_ids}")
    return added


def write_chatml(tokenizer: str, target: Path) -> list[str]:
    """Copy a tokenizer to ``target`` with the template, and with the tokens of ChatML that it lacks.

    Returns:
        The tokens that were added.

    Raises:
        CriusError: ``target`` exists, or cannot be written.
    """
    import tokenizers  # noqa: PLC0415  optional package

    source = folder_of(tokenizer)
    model = tokenizers.Tokenizer.from_file(str(source / TOKENIZER))
    missing = [mark for mark in (START, END) if model.token_to_id(mark) is None]
    model.add_special_tokens([tokenizers.AddedToken(mark, special=True, normalized=False) for mark in (START, END)])
    settings = {**read_object(tokenizer, TOKENIZER_CONFIG), "eos_token": END}
    settings.pop("chat_template", None)
    with new_folder(str(target)) as folder:
        for file in source.glob("*.json"):
            if file.name in ("special_tokens_map.json", "added_tokens.json"):
                shutil.copy2(file, folder / file.name)
        model.save(str(folder / TOKENIZER))
        (folder / TOKENIZER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
        (folder / TEMPLATE).write_text(CHATML)
    return missing
