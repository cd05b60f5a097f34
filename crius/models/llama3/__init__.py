"""Llama 3 (arXiv:2407.21783). This file is torch-free; the code is in ``model.py``."""

from crius.models.llama3.config import FLAVORS, customize
from crius.models.llama3.hf import HF_NAMES
from crius.models.llama3.plan import plan
from crius.models.spec import ModelSpec

SPEC = ModelSpec(
    name="llama3",
    flavors=FLAVORS,
    customize=customize,
    plan=plan,
    module="crius.models.llama3.model:Llama3",
    hf_names=HF_NAMES,
)
