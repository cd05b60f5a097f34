"""``crius models`` says what there is: families, flavors with their sizes, words, recipes."""

import json

from crius import cli
from crius.config.load import recipe_names
from crius.models.config import WORDS
from crius.models.registry import SPECS


def listed(capsys):
    assert cli.main(["models", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_flavor_word_and_recipe_is_listed(capsys):
    facts = listed(capsys)
    assert {name: list(one["flavors"]) for name, one in facts["families"].items()} == {
        name: list(spec.flavors) for name, spec in SPECS.items()
    }
    assert facts["families"]["llama3"]["flavors"]["8b"] == 8_030_261_248
    assert sorted(facts["words"]) == sorted(WORDS)
    assert all(facts["words"].values())
    assert facts["recipes"] == recipe_names()


def test_a_family_has_the_words_of_its_layers_and_of_its_config_json(capsys):
    families = listed(capsys)["families"]
    assert families["qwen2"]["words"] == ["qkv_bias"]
    assert families["llama3"]["words"] == ["qkv_bias", "o_bias", "mlp_bias"]  # by keys alone
    assert "pattern" in families["mistral"]["words"]


def test_the_list_fits_a_terminal_and_has_all_that_json_has(capsys):
    facts = listed(capsys)
    assert cli.main(["models"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    said = text.split()
    for name in (*(f"{name}:" for name in facts["families"]), *facts["words"]):
        assert name in said
    assert "gemma3_text" in said and "Gemma3ForCausalLM" in said
