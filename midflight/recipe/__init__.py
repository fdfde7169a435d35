"""Recipes: what a run is made of. Their keys, reading them, the rules between keys, and the recipe that a run keeps."""

from midflight.recipe.config import Recipe, RecipeError, resolved
from midflight.recipe.reading import load_recipe

__all__ = ["Recipe", "RecipeError", "load_recipe", "resolved"]
