"""A tokenizer folder with a chat template, and conversations, for tests of fine-tuning."""

import json
from functools import partial
from pathlib import Path

from crius.data.prepare import write
from crius.data.tokens import TokenFile
from crius.data.work import Work, encode_samples
from crius.tokens.tokenizer import ByteTokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_folder(folder: Path) -> Path:
    """Bytes, the three special tokens of ChatML, and its template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    model.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    folder.mkdir(parents=True, exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def conversations(number: int) -> list[dict]:
    """Of one to four turns, of different lengths; the question and the answers say which one it is."""
    found = []
    for index in range(number):
        messages = [{"role": "system", "content": "Be brief."}] if index % 5 == 0 else []
        for turn in range(1 + index % 4):
            messages.append({"role": "user", "content": f"Question {index}.{turn}" + "?" * (index * 7 % 23)})
            messages.append({"role": "assistant", "content": f"Answer {index}.{turn}" + "!" * (index * 5 % 31)})
        found.append({"messages": messages})
    return found


def write_conversations(file: Path, number: int) -> Path:
    file.write_text("".join(json.dumps(one) + "\n" for one in conversations(number)))
    return file


class _Given:
    """Stands for an encoder: the samples are there already."""

    fingerprint = "given"

    def encode(self, samples):
        return samples


def samples_folder(out: Path, samples: list) -> TokenFile:
    """A folder of samples, each the ids and which of them are to be predicted."""
    work = Work([samples], partial(encode_samples, _Given()), lambda: None, _Given.fingerprint)
    write(out, work, ByteTokenizer(), source="test")
    return TokenFile(out)
