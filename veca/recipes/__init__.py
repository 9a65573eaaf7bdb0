"""Recipes: one file each, stating what it trains, on what, for how long, its command and the expected result."""

from __future__ import annotations

from veca.distill.settings import Distillation
from veca.recipes.convert import Convert
from veca.recipes.laptop import Laptop
from veca.recipes.stage1 import Stage1
from veca.recipes.stage2 import Stage2

RECIPES: dict[str, type[Distillation]] = {
    "stage1": Stage1,
    "stage2": Stage2,
    "laptop": Laptop,
    "convert": Convert,
}
