"""The table of which model fits which card is what the planner says."""

import importlib.util
import re

import pytest
from harness import ROOT


@pytest.mark.full
def test_the_table_of_cards_is_what_the_planner_says():
    spec = importlib.util.spec_from_file_location("fits", ROOT / "docs/fits.py")
    fits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fits)
    page = (ROOT / "docs/which_model_fits.md").read_text()
    (made,) = re.findall(r"<!-- made by docs/fits.py -->\n(.*?)\n<!-- end of what it made -->", page, re.DOTALL)
    assert made.splitlines() == fits.table()
