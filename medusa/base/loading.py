"""Loading a base model by its name: a wrong name or a wrong kind of model is one sentence, at once.

``transformers`` asks the hub for file after file and tries each one again; here the hub is asked once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HFValidationError, HTTPError, RepositoryNotFoundError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, AutoConfig, AutoModelForCausalLM

from medusa.base.causal_lm import CausalLM

SECONDS_FOR_THE_HUB = 10


def load_base(source: str | Path, **kwargs: Any) -> CausalLM:
    """The model at ``source``, a directory or a hub id, in evaluation mode; ``kwargs`` as for transformers.

    Raises:
        FileNotFoundError: there is no such model, or the hub cannot be reached and its cache has none.
        ValueError: it is no causal language model.
    """
    place = base_place(source)
    kind = type(AutoConfig.from_pretrained(place))
    if kind in MODEL_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"base must be a causal language model, got {str(source)!r}, a {kind.model_type} model; choose a "
            "decoder-only one, such as those of Llama or Qwen"
        )
    base: Any = AutoModelForCausalLM.from_pretrained(place, **kwargs)
    return base.eval()


def base_place(source: str | Path) -> str:
    """Where to load a model and its tokenizer from: ``source``, or its copy in the cache of an absent hub.

    Raises:
        FileNotFoundError: as :func:`load_base`.
    """
    name = str(source)
    if Path(name).is_dir():
        return name
    advice = "give the directory of a model, or a hub id of the form owner/name"
    if Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"no base model at {name!r}; {advice}")
    try:
        HfApi().model_info(name, timeout=SECONDS_FOR_THE_HUB)
    except HFValidationError as error:
        raise FileNotFoundError(f"no base model at {name!r}; {advice}") from error
    except GatedRepoError as error:
        raise FileNotFoundError(
            f"the base model {name!r} is gated on the hub; accept its terms there, then `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"no base model at {name!r}, neither here nor on the hub; {advice}"
        ) from error
    except (HTTPError, OSError) as error:
        cached = try_to_load_from_cache(name, "config.json")
        if not isinstance(cached, str):
            raise FileNotFoundError(
                f"no base model at {name!r}: it is no directory here, the hub's cache has none, and the hub "
                f"cannot be reached ({error}); {advice}"
            ) from error
        return str(Path(cached).parent)
    return name
