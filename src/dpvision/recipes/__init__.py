"""Settings that run by name. The library itself never imports this package."""

from __future__ import annotations

from dpvision.checks import ArgumentError
from dpvision.recipes.demo import demo
from dpvision.recipes.recipe import Recipe
from dpvision.recipes.shoefit import fashion_shoefit_tanh, mnist_shoefit

__all__ = ["Recipe", "all_recipes", "find_recipe"]


def all_recipes() -> tuple[Recipe, ...]:
    """Every recipe, in the order of the list that ``dpvision recipes`` prints."""
    return (demo(), mnist_shoefit("tanh"), mnist_shoefit("relu"), fashion_shoefit_tanh())


def find_recipe(name: str) -> Recipe:
    """The recipe of that name."""
    recipes = {recipe.name: recipe for recipe in all_recipes()}
    if name not in recipes:
        raise ArgumentError(f"recipe must be one of {', '.join(recipes)}, got {name!r}.")
    return recipes[name]
