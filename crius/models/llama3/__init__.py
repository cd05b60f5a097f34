"""Llama 3 (arXiv:2407.21783): the plain decoder of ``crius.models.decoder``, with frequencies stretched since 3.1."""

from crius.models.llama3.config import FLAVORS
from crius.models.llama3.hf import HF
from crius.models.llama3.plan import plan
from crius.models.spec import ModelSpec

SPEC = ModelSpec(name="llama3", flavors=FLAVORS, plan=plan, hf=HF)
