"""Qwen3, dense (arXiv:2505.09388): queries and keys are normalised head by head before positions turn them."""

from crius.models.qwen3.config import FLAVORS
from crius.models.qwen3.hf import HF
from crius.models.qwen3.plan import plan
from crius.models.spec import ModelSpec

SPEC = ModelSpec(name="qwen3", flavors=FLAVORS, plan=plan, block="crius.models.qwen3.block:Qwen3Block", hf=HF)
