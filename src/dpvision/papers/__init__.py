"""Recipes: the settings of the papers, runnable by name, and the tables made of them.

One file per paper yields its recipes; ``tables`` groups them as the papers do; ``reproduce`` runs a table. The library
itself never imports this package.
"""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path

from dpvision.errors import ArgumentError
from dpvision.papers.making_the_shoe_fit import shoefit_cifar_recipes, shoefit_recipes
from dpvision.papers.own_recipes import cifar100_feature_recipes, demo, feature_recipes, small_cnn_recipes
from dpvision.papers.quick import MEANS_NOTHING, quick_config
from dpvision.papers.recipe import NOT_RUN, SCALES, Recipe
from dpvision.papers.recipe_data import place_data
from dpvision.papers.scalenorm import scalenorm_recipes
from dpvision.papers.scalenorm_segmentation import segmentation_recipes
from dpvision.papers.smoothnets import smoothnet_recipes
from dpvision.papers.through_scale import scale_recipes

__all__ = [
    "MEANS_NOTHING",
    "NOT_RUN",
    "SCALES",
    "Recipe",
    "all_recipes",
    "find_recipe",
    "place_data",
    "published_results",
    "quick_config",
]


@cache
def all_recipes() -> tuple[Recipe, ...]:
    """Return every recipe, paper by paper."""
    return (
        demo(),
        *shoefit_recipes(),
        *shoefit_cifar_recipes(),
        *scalenorm_recipes(),
        *segmentation_recipes(),
        *smoothnet_recipes(),
        *scale_recipes(),
        *feature_recipes(),
        *cifar100_feature_recipes(),
        *small_cnn_recipes(),
    )


def find_recipe(name: str) -> Recipe:
    """Return the recipe of that name.

    Args:
        name: Name as ``dpvision recipes`` lists it.

    Raises:
        ArgumentError: There is no such recipe; the message suggests similar names.
    """
    recipes = {recipe.name: recipe for recipe in all_recipes()}
    if name not in recipes:
        close = difflib.get_close_matches(name, recipes, n=3, cutoff=0.4)
        hint = f"Did you mean {' or '.join(close)}?" if close else "`dpvision recipes` lists them."
        raise ArgumentError(f"recipe must be the name of a recipe, got {name!r}. {hint}")
    return recipes[name]


def published_results(dataset: str) -> list[tuple[str, float, float]]:
    """Return what the papers report on a dataset, for charts beside own results.

    Args:
        dataset: Name of a data source, such as ``fashionmnist``.

    Returns:
        (citation, epsilon, accuracy from 0 to 1) of every private classification result in the recipes, by epsilon.
    """
    found = {
        (recipe.source, recipe.config.privacy.target_epsilon, recipe.accuracy / 100)
        for recipe in all_recipes()
        if recipe.accuracy is not None
        and recipe.config.privacy.enabled
        and recipe.config.privacy.target_epsilon is not None
        and recipe.config.task == "classification"
        and Path(recipe.config.data.source).name == dataset
    }
    return sorted(found, key=lambda result: (result[1], result[0], result[2]))
