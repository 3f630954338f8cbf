"""Loading a base model by its name: a wrong name or a wrong kind of model is one sentence, at once.

``transformers`` asks the hub for each file and retries; here there is one request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi, constants, scan_cache_dir, try_to_load_from_cache
from huggingface_hub.errors import CacheNotFound, HfHubHTTPError, HTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError
from transformers import MODEL_MAPPING, AutoConfig, AutoTokenizer, PreTrainedConfig
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from medusa.assets import base_named
from medusa.base.causal_lm import CausalLM
from medusa.base.gguf_file import GGUFFile, begins_as_gguf, is_gguf
from medusa.base.notices import hide_notices
from medusa.base.quantised_directory import (
    PLACES,
    QuantisedDirectory,
    described_settings,
    is_quantised,
)
from medusa.base.text_part import auto_class, text_part, writes_text
from medusa.hub import (
    HUB_ARGUMENTS,
    explained_hub_errors,
    hub_directory,
    looks_like_repository,
    split_revision,
)

SECONDS_FOR_THE_HUB = 10
SOURCE_ARGUMENTS = (
    "revision",
    "token",
    "cache_dir",
    "local_files_only",
    "trust_remote_code",
    "code_revision",
    "force_download",
    "proxies",
    "subfolder",
    "gguf_file",
)
"""The arguments of ``from_pretrained`` that say where files come from."""
MISSING_OK = {
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_gated_repo": False,
    "_raise_exceptions_for_connection_errors": False,
}
PROCESSOR_TEMPLATE = "chat_template.json"
hide_notices()


@dataclass(frozen=True)
class BaseSource:
    """A base that was found by its name; only its configuration has been read."""

    name: str
    """The directory or hub id that ``transformers`` loads."""
    arguments: dict[str, Any]
    """Arguments for ``from_pretrained``."""
    config: PreTrainedConfig
    gguf: GGUFFile | None = None
    """The file that holds the model, where it is one in the GGUF format."""

    @property
    def hidden_size(self) -> int | None:
        """D, the width of the LM head's input; None if the configuration does not name it."""
        text = self.config.get_text_config(decoder=True)
        return getattr(text, "word_embed_proj_dim", None) or getattr(text, "hidden_size", None)

    @property
    def vocab_size(self) -> int | None:
        """V, the rows of the LM head; None if the configuration does not name it."""
        return getattr(self.config.get_text_config(decoder=True), "vocab_size", None)


def find_base(source: str | Path | BaseSource, **kwargs: Any) -> BaseSource:
    """Find the model at ``source``, a directory or a hub id, without loading it. ``kwargs`` are the arguments
    of transformers; a base found before gets them added to its own.

    A hub id may name a revision, ``owner/name@revision``. A model whose code comes with it is run with
    ``trust_remote_code=True`` only.

    Raises:
        FileNotFoundError: there is no such model, or the hub cannot be reached and its cache has none.
        ValueError: it is no causal language model, or an adapter for one, or its code is not trusted.
    """
    if isinstance(source, BaseSource):
        return replace(source, arguments={**source.arguments, **kwargs})
    kwargs = {"trust_remote_code": False, **kwargs}  # else transformers asks for it
    path = gguf_path(source, kwargs)
    if path is not None:
        file = GGUFFile.open(path)
        config = gguf_model().gguf_config(file)
        name = str(source) if ":" in str(source) else str(file.path)  # as owner/name:Q4_K_M, or the file
        config._name_or_path = config.name_or_path = name
        return BaseSource(name, kwargs, config, file)
    name, arguments = resolve_source(source, kwargs)
    config = arguments.get("config")
    if config is None:
        config = AutoConfig.from_pretrained(name, **source_arguments(arguments))
    if type(config) in MODEL_MAPPING and not writes_text(config):
        raise ValueError(
            f"base must be a causal language model, got {name!r}, a {config.model_type} model; choose a "
            "decoder-only one, such as Llama or Qwen"
        )
    return BaseSource(name, arguments, config)


def load_by_transformers(source: BaseSource, dtype: torch.dtype | str | None = None) -> CausalLM:
    """The model at ``source`` in evaluation mode as ``transformers`` loads it: in ``dtype``, "auto" or None,
    the type of its files; where the arguments of ``source`` place it.

    Raises:
        FileNotFoundError: as :func:`find_base`.
        ValueError: so too, or a file of its weights is damaged, or none holds the LM head or another weight.
    """
    typed = {} if dtype is None else {"dtype": dtype}
    arguments = {**source.arguments, **typed, "output_loading_info": True}
    with explained_damage(source.name):
        loaded: Any = auto_class(source.config).from_pretrained(source.name, **arguments)
    base, info = loaded
    base = text_part(base)
    _check_has_all(source.name, base, info["missing_keys"])
    return base.eval()


def _check_has_all(name: str, base: CausalLM, missing_keys: Iterable[str]) -> None:
    """Raise ValueError if a weight of ``base`` is among those that its files lack: it is random."""
    names = {id(parameter): parameter_name for parameter_name, parameter in base.named_parameters()}
    missing = [key for key in missing_keys if key in names.values()]
    if not missing:
        return
    head = names.get(id(base.get_output_embeddings().weight))
    if head in missing:
        raise ValueError(
            f"base {name!r} is no language model: its files hold no LM head ({head}), so it would answer "
            "from random weights; name a checkpoint of the whole model"
        )
    raise ValueError(
        f"base {name!r} must have a tensor for {missing[0]!r} ({len(missing)} in all), and has none, so it "
        "would answer from random weights; copy or download it again. If it is quantised, its config.json "
        "must say so (quantization_config)"
    )


def gguf_model() -> Any:
    """The module :mod:`medusa.base.gguf_model`.

    Raises:
        ValueError: the installed ``transformers`` lacks what it needs.
    """
    try:
        from medusa.base import gguf_model as module
    except ImportError as error:
        raise ValueError(
            f"reading a GGUF file needs transformers 5.18 or newer, got {transformers.__version__}; "
            "pip install --upgrade 'transformers<6'"
        ) from error
    return module


def gguf_path(source: str | Path, kwargs: Mapping[str, Any]) -> Path | None:
    """The GGUF file that ``source`` names: the file itself, a directory with one and no model beside it, or
    one of a repository on the hub, ``owner/name:Q4_K_M``. None where it names none.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the directory or the repository has several, or none of that name.
    """
    named = kwargs.get("gguf_file")
    path = Path(base_named(str(source)))
    if named is not None and path.is_dir():
        path = path / named
    if is_gguf(path):
        if not path.is_file():
            raise FileNotFoundError(f"no GGUF file at {str(path)!r}")
        return path
    if begins_as_gguf(path):
        return path
    if path.is_dir():
        if (path / CONFIG_NAME).exists() or (path / ADAPTER_CONFIG_NAME).exists():
            return None
        files = sorted(file for file in path.iterdir() if is_gguf(file))
        models = sorted({GGUFFile.first_part(file).name for file in files})
        if len(models) > 1:
            raise ValueError(
                f"base must be one GGUF file, got the directory {str(path)!r} with {', '.join(models)}; "
                "name one"
            )
        return path / models[0] if models else None
    repository, colon, tag = str(source).partition(":")
    if not colon or not tag or not looks_like_repository(repository) or "/" not in repository:
        return None
    return _gguf_of_repository(repository, tag, kwargs)


def _gguf_of_repository(repository: str, tag: str, kwargs: Mapping[str, Any]) -> Path:
    """The file of a repository whose name has ``tag`` between its dashes and dots, as for llama.cpp's
    ``-hf``."""
    what = "base model"
    advice = "give a hub id of the form owner/name:Q4_K_M"
    options = {key: kwargs[key] for key in HUB_ARGUMENTS if kwargs.get(key) is not None}
    name, revision = split_revision(repository)
    cached: dict[str, Path] = {}
    try:
        with explained_hub_errors(what, repository, advice):
            files = HfApi(token=kwargs.get("token")).list_repo_files(name, revision=revision)
    except FileNotFoundError:
        cached = _cached_files(name, revision, kwargs.get("cache_dir"))
        if not cached:
            raise
        files = list(cached)
    models = _gguf_models(files)
    has_tag = re.compile(rf"(^|[-._]){re.escape(tag)}($|[-._])", re.IGNORECASE)
    tagged = [file for file in models if has_tag.search(Path(file).name) and "mmproj" not in file.lower()]
    if len(tagged) != 1:
        candidates = ", ".join(tagged or models) or "none"
        raise ValueError(
            f"{repository}:{tag} must name one GGUF file of the repository, and {len(tagged)} are called so; "
            f"there {'is' if candidates == 'none' else 'are'} {candidates}"
        )
    (file,) = tagged
    if cached and file not in cached:
        raise FileNotFoundError(
            f"the hub cannot be reached, and its cache has only other parts of {repository}:{tag} than "
            f"{file}; try again when it can be"
        )
    if cached:
        return cached[file]
    parts = [str(part) for part in GGUFFile.parts(Path(file))]
    return hub_directory(repository, parts, what, advice, **options) / file


def _gguf_models(files: Iterable[str]) -> list[str]:
    """The GGUF files among ``files``; of a model in several parts, the first."""
    return sorted({str(GGUFFile.first_part(Path(file))) for file in files if is_gguf(file)})


def _cached_files(repository: str, revision: str | None, cache_dir: str | Path | None) -> dict[str, Path]:
    """The GGUF files of a repository that the hub's cache has, by name."""
    with suppress(CacheNotFound):
        for cached in scan_cache_dir(cache_dir or constants.HF_HUB_CACHE).repos:
            for snapshot in cached.revisions if cached.repo_id == repository else ():
                if revision is None or revision == snapshot.commit_hash or revision in snapshot.refs:
                    files = [file for file in snapshot.files if is_gguf(file.file_name)]
                    return {file.file_name: file.file_path for file in files}
    return {}


# ------------------------------------------------------------------ quantised directories


def is_held_quantised(source: BaseSource) -> bool:
    """Whether the base at ``source`` is quantised in a form that the engines of a CPU hold in its own bits: a
    GGUF file, or a directory that :mod:`medusa.base.quantised_directory` reads."""
    return source.gguf is not None or (
        is_quantised(source.config) and "quantization_config" not in source.arguments
    )


def quantised_directory(source: BaseSource) -> QuantisedDirectory:
    """The files of a base that is quantised and no GGUF file.

    Raises:
        ValueError: there are no safetensors files, or one is damaged, or an adapter lies beside them.
    """
    if Path(source.name, ADAPTER_CONFIG_NAME).exists():
        raise ValueError(
            f"base {source.name!r} is quantised and has an adapter beside its weights "
            f"({ADAPTER_CONFIG_NAME}), which would change them; take the adapter's files out, or give the "
            "base that it was trained on"
        )
    with explained_damage(source.name):
        files = weight_files(source)
        if not files:
            raise ValueError(
                f"base {source.name!r} is quantised ({described_settings(source.config)}), and is read from "
                "safetensors files, of which it has none; name another repository of it"
            )
        return QuantisedDirectory(source.name, source.config, files)


def load_widened(source: BaseSource, dtype: torch.dtype) -> CausalLM:
    """The quantised base at ``source`` with all weights in ``dtype``, as ``transformers`` computes with them.

    Raises:
        ValueError: it is in a form that is not read.
    """
    if source.gguf is not None:
        return gguf_model().load_widened(source.gguf, source.config, dtype)
    directory = quantised_directory(source)
    model = directory.empty_model(**source_arguments(source.arguments))
    return directory.filled(model, *directory.of_text(model), dtype)


def weight_files(source: BaseSource, alone: str = SAFE_WEIGHTS_NAME) -> list[Path]:
    """The safetensors files of a checkpoint, from the hub where they are not here; none where it has none.

    ``alone`` is the name of the file where there is only one: :data:`WEIGHTS_NAME` asks for ``.bin`` files.
    """
    options = {key: value for key, value in source.arguments.items() if key in PLACES}
    only_file = cached_file(source.name, alone, **options, **MISSING_OK)
    if only_file is not None:
        return [Path(only_file)]
    index = cached_file(source.name, f"{alone}.index.json", **options, **MISSING_OK)
    if index is None:
        return []
    files, _ = get_checkpoint_shard_files(source.name, index, **options)
    return [Path(file) for file in files]


@contextmanager
def explained_kind(name: str) -> Iterator[None]:
    """Within, a model that is no causal language model is a ValueError without the list of all that are."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        if "Unrecognized configuration class" not in message:
            raise
        kind = re.search(r"configuration_(\w+)\.", message)
        raise ValueError(
            f"base {name!r} is of type {kind[1] if kind else 'unknown'!r}, of which transformers has no "
            "causal language model; name a model that AutoModelForCausalLM loads"
        ) from error


@contextmanager
def explained_damage(name: str) -> Iterator[None]:
    """Within, files of the base called ``name`` that cannot be read, or whose weights have other shapes than
    its configuration says, are a ValueError, and one that is missing is a FileNotFoundError."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(
            f"the weights of base {name!r} cannot be read: a safetensors file is damaged ({error}); copy or "
            "download it again"
        ) from error
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"base {name!r} lacks a file of weights that its index names: {error.filename or error}; copy or "
            "download it again"
        ) from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(
            f"the weights of base {name!r} have other shapes than its config.json says, as the table above "
            "shows; correct config.json (tokens that were added count in vocab_size), or download both again"
        ) from error


def load_tokenizer(source: str | Path | BaseSource, **kwargs: Any) -> Any:
    """The tokenizer at ``source``, as :func:`find_base` finds models, if it has one.

    Raises:
        FileNotFoundError: as :func:`find_base`.
    """
    if isinstance(source, BaseSource):
        file = source.gguf
    else:
        path = gguf_path(source, kwargs)
        file = None if path is None else GGUFFile.open(path)
    if file is not None:
        tokenizer = gguf_model().gguf_tokenizer(file)
        tokenizer.chat_template = _with_default(tokenizer.chat_template)
        return tokenizer
    if isinstance(source, BaseSource):
        name = source.name
        arguments = source_arguments(source.arguments)
    else:
        name, arguments = resolve_source(source, {"trust_remote_code": False, **source_arguments(kwargs)})
    tokenizer = AutoTokenizer.from_pretrained(name, **arguments)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _template_of_processor(name, arguments)
    tokenizer.chat_template = _with_default(tokenizer.chat_template)
    return tokenizer


def _with_default(templates: Any) -> Any:
    """The chat templates of a tokenizer, one or several by name, with a default among these: that for tools
    where there is no other, as in llama.cpp. None where there is neither, and none would be taken."""
    match templates:
        case {"default": _}:
            return templates
        case {"tool_use": template}:
            return {"default": template, **templates}
        case {**_others}:
            return None
    return templates


def _template_of_processor(name: str, arguments: dict[str, Any]) -> str | None:
    """The chat template of a model of images that was saved before tokenizers had it too; None where there is
    none."""
    options = {key: value for key, value in arguments.items() if key in PLACES}
    path = cached_file(name, PROCESSOR_TEMPLATE, **options, **MISSING_OK)
    if path is None:
        return None
    try:
        return json.loads(Path(path).read_text("utf-8")).get("chat_template")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} must be a JSON object ({error}); download it again") from error


def source_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments among ``kwargs`` that say where files come from."""
    return {key: kwargs[key] for key in SOURCE_ARGUMENTS if key in kwargs}


def resolve_source(source: str | Path, kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name that ``transformers`` loads for ``source``, and the arguments: only the cache is used where
    the hub cannot be reached.

    The name of the embedded base becomes the directory that :func:`medusa.assets.base_named` finds.

    Raises:
        FileNotFoundError: as :func:`find_base`.
        ValueError: it is an adapter, and no model.
    """
    name = base_named(str(source))
    if Path(name).is_dir():
        if not kwargs.get("subfolder"):
            _check_is_no_adapter(name, {path.name for path in Path(name).iterdir()})
        return name, kwargs
    what = "base model"
    advice = "give the directory of a model, or a hub id of the form owner/name"
    if not looks_like_repository(name):
        raise FileNotFoundError(f"no {what} at {name!r}; {advice}")
    repository, revision = split_revision(name)
    if revision is not None and (kwargs.get("revision") or revision) != revision:
        raise ValueError(f"revision must be given once, got {name!r} and revision={kwargs['revision']!r}")
    revision = revision or kwargs.get("revision")
    with explained_hub_errors(what, f"{repository}@{revision}" if revision else repository, advice):
        is_online = _hub_answers(repository, revision, kwargs)
    arguments = {**kwargs, "revision": revision} if revision else kwargs
    return repository, arguments if is_online else {**arguments, "local_files_only": True}


def _hub_answers(repository: str, revision: str | None, kwargs: dict[str, Any]) -> bool:
    """Whether the hub answers for a repository; where it does not, the cache must hold a copy."""
    cached = try_to_load_from_cache(
        repository, "config.json", revision=revision, cache_dir=kwargs.get("cache_dir")
    )
    is_cached = isinstance(cached, str)
    if kwargs.get("local_files_only"):
        if not is_cached:
            raise LocalEntryNotFoundError("no copy in the cache")
        return False
    try:
        model_info = HfApi(token=kwargs.get("token")).model_info(
            repository, revision=revision, timeout=SECONDS_FOR_THE_HUB
        )
    except (HTTPError, OSError) as error:
        is_refusal = isinstance(error, HfHubHTTPError) and error.response.status_code < 500
        if is_refusal or not is_cached:
            raise
        return False
    if not kwargs.get("subfolder"):
        files = {file.rfilename for file in model_info.siblings or ()}
        _check_is_no_adapter(repository, files)
        models = _gguf_models(files)
        if models and CONFIG_NAME not in files:
            raise ValueError(
                f"base must name one GGUF file of {repository}, as {repository}:Q4_K_M; there are "
                f"{', '.join(models)}"
            )
    return True


def _check_is_no_adapter(name: str, files: set[str]) -> None:
    """Raise ValueError where ``files`` hold only a PEFT adapter.

    ``transformers`` would load its base with it, under the base's name; but heads for it are none for the
    base.
    """
    if ADAPTER_CONFIG_NAME in files and CONFIG_NAME not in files:
        raise ValueError(
            f"base must be a whole model, got {name!r}, a PEFT adapter for one; write both into a directory "
            f"and give that: peft.AutoPeftModelForCausalLM.from_pretrained({name!r}).merge_and_unload()"
            ".save_pretrained(DIRECTORY), and the base's tokenizer.save_pretrained(DIRECTORY). A prompt that "
            "was tuned cannot be merged: train an adapter of the layers, such as LoRA"
        )
