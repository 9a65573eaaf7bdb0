"""`veca distill`: train a model from a frozen teacher, by a recipe."""

from __future__ import annotations

from pathlib import Path

from veca.cli import parse
from veca.errors import InputError
from veca.files import refuse_file
from veca.recipes import RECIPES


def usage() -> str:
    lines = [f"  {name:<9}{(recipe.__doc__ or '').strip().splitlines()[0]}" for name, recipe in RECIPES.items()]
    return "\n".join(
        [
            "usage: veca distill RECIPE --train IMAGES… --val IMAGES… --teacher MODEL --out FOLDER [settings]",
            "       veca distill --plot FOLDER        draw the curves of a run",
            "",
            *lines,
            "",
            "`veca distill RECIPE --help` prints what the recipe does, and every setting with its value. The same",
            "command again continues a run that was stopped, killed or cut off, from where it was.",
            "",
            "Examples:",
            "  veca distill convert --train photos/ --val more-photos/ --teacher teacher/ --out runs/a",
            "  veca distill stage1 --student veca_base --train train/ --val val/ \\",
            "      --teacher facebook/dinov3-vitb16-pretrain-lvd1689m --out runs/base",
        ]
    )


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    name, *rest = arguments
    if name == "--plot":
        from veca.distill.curves import plot

        if len(rest) != 1:
            raise InputError("--plot needs the folder of one run: veca distill --plot runs/x")
        print(plot(Path(rest[0])))
        return 0
    if name not in RECIPES:
        raise InputError(f"no recipe is called {name!r}; there are {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    settings = parse(recipe, rest, f"veca distill {name}")
    refuse_file(settings.out)
    from veca.distill.engine import train

    train(settings)
    return 0
