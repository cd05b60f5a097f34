"""Verbs as people of other programs type them, and the verb of Crius for each. Imports little: it answers first."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from crius.errors import ConfigError

_VERBS = {
    "bench quantize": "quantise,quantize",
    "checkpoint ls": "checkpoints,checkpoint list,checkpoint show",
    "checkpoint prune": "checkpoint clean,checkpoint delete,checkpoint remove,checkpoint rm",
    "config show": "config get,config list,config print,settings,show-config",
    "data prepare": "data preprocess,data tokenise,data tokenize,prepare,preprocess,tokenise,tokenize",
    "data show": "data head,data inspect,data preview,data view",
    "doctor": "check,diagnose,env,info",
    "evaluate": "benchmark,eval,lm-eval,score,test",
    "export": "convert,merge,merge-lora,push,save,upload",
    "generate": "chat,complete,infer,inference,predict,prompt,run-model,sample",
    "import": "download,fetch,pull",
    "models": "list,ls,model",
    "plan": "estimate,estimate-memory,memory",
    "report": "dashboard,log,logs,plot,tensorboard",
    "runs": "history,jobs,ps,status",
    "sweep": "grid,hpo,search",
    "train": "fit,launch,pretrain,run,start,torchrun",
    "train --job.run_dir": "continue,restart,resume",
    "train --recipe smollm2_lora": "lora,qlora",
    "train --recipe smollm2_sft": "fine-tune,finetune,instruct,sft",
    "verify parity": "verify all,verify layouts",
}
_WORDS = {words: verb for verb, others in _VERBS.items() for words in others.split(",")} | {
    "recipes": "config show --recipe llama3_debug",
    "recipe": "config show --recipe llama3_debug",
}
_RECIPES = ", ".join(sorted(file.stem for file in (Path(__file__).parent.parent / "recipes").glob("*.toml")))
_WHY = {
    **dict.fromkeys(("list", "ls"), "crius models, crius runs and crius checkpoint ls RUN list what there is"),
    **dict.fromkeys(("recipe", "recipes"), f"a recipe is a flag of train: {_RECIPES}"),
    **dict.fromkeys(("continue", "restart", "resume"), "the command of a run continues it if it names the same folder"),
    **dict.fromkeys(
        ("dpo", "grpo", "kto", "orpo", "ppo", "reward", "rl", "rlhf", "rloo"), "DPO, rewards and RL are not built"
    ),
}


def check_verb(arguments: Sequence[str]) -> None:
    """Answer a verb of another program, or a command line without a verb.

    Raises:
        ConfigError: the first words are not a verb of Crius; the fix is the command that was meant.
    """
    for count in (2, 1):
        words = " ".join(arguments[:count]).lower().replace("_", "-")
        rest = list(arguments[count:])
        if words in _WORDS:
            raise no_verb(words, [*_WORDS[words].split(), *rest], _WHY.get(words, ""))
        if words in _WHY:
            raise no_verb(words, ["train", "--recipe", "smollm2_sft", *rest], _WHY[words])
    name, equals, _ = arguments[0].partition("=") if arguments else ("", "", "")
    if (equals or name.startswith("--")) and name not in ("--help", "--import", "--version"):
        raise no_verb(arguments[0], ["train", *arguments])


def no_verb(words: str, command: Sequence[str], why: str = "") -> ConfigError:
    """Error about ``words`` where a verb should be; ``command`` was meant."""
    fix = shlex.join(["crius", *command])
    return ConfigError(f"{words} is not a verb of crius.", where="command line", why=why, fix=fix)
