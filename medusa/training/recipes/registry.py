"""Every kind of training by its name."""

from __future__ import annotations

from collections.abc import Callable

from medusa.base.causal_lm import CausalLM
from medusa.training.config.configuration import TrainingConfiguration
from medusa.training.data.documents import Documents
from medusa.training.recipes.eagle3_head import Eagle3Recipe
from medusa.training.recipes.joint import JointRecipe
from medusa.training.recipes.medusa_heads import MedusaRecipe
from medusa.training.run.recipe import Recipe
from medusa.training.states.live import LiveStates
from medusa.training.states.stored_states import StateFile

RECIPES: dict[str, type[Recipe]] = {
    "medusa": MedusaRecipe,
    "eagle3": Eagle3Recipe,
    "joint": JointRecipe,
}


def new_recipe(
    configuration: TrainingConfiguration,
    base: CausalLM,
    training: Documents,
    stored: StateFile | None = None,
    live: LiveStates | None = None,
) -> Recipe:
    """The recipe that the configuration asks for, with new heads for ``base`` and ``training``.

    Where the states of ``training`` are ``stored``, or ``live`` computes them, ``base`` needs no layers.

    Raises:
        ConfigurationError: the heads to start from have other options.
        ImportError: peft, which joint training needs, is not installed.
    """
    kind: Callable[..., Recipe] = RECIPES[configuration.kind]
    return kind(configuration, base, training, stored, live)
