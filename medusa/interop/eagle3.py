"""EAGLE-3 heads as other projects write and read them (arXiv 2503.01840), in two layouts.

    plain         what SafeAILab, AngelSlim and SpecForge write, and vLLM, SGLang, TensorRT-LLM and llama.cpp
                  read: a Llama configuration of one layer with draft_vocab_size, and midlayer.* tensors
    speculators   what vllm-project/speculators writes and vLLM reads: the same keys under
                  transformer_layer_config, the base under speculators_config, layers.0.* tensors

    fc.weight                       (D, L * D): joins the base's states after L layers
    midlayer.{input_layernorm,hidden_norm,post_attention_layernorm}.weight, norm.weight   (D,)
    midlayer.self_attn.{q,k,v}_proj.weight (heads * head_dim, 2 * D), .o_proj.weight (D, heads * head_dim)
    midlayer.mlp.{gate,up,down}_proj.weight
    lm_head.weight                  (V', D)
    d2t                             (V',) int64: token id minus its index; t2d (V,) bool says the same
    fc_norm.{i}.weight (D,), input_norm.weight (L * D,)    only where config.json says fc_norm, norm_before_fc

Nothing in a checkpoint shows which layers it was trained on. vLLM takes k for the state after k layers, and
(2, L // 2, L - 3) of L where config.json names none; wrong ones give guesses as bad as random and no error.
norm_before_residual, where it is absent, is false in the plain layout, and true in vLLM's reading of the
other. All engines verify a chain of the best guesses.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa.base.causal_lm import CausalLM, embedding_weight, lm_head, vocab_size
from medusa.console import megabytes
from medusa.files import read_json
from medusa.heads.causal_layer import DEFAULT_THETA
from medusa.heads.draft_vocab import checked_token_map
from medusa.heads.eagle3 import Eagle3Config, Eagle3Head, default_layers
from medusa.heads.fingerprint import TOLERANCE, relative_distance
from medusa.heads.medusa_heads import MAX_DEPTH
from medusa.heads.tensor_files import check_tensors, matrix_shape, read_model_tensors
from medusa.interop.protocol import (
    CONFIG_FILE,
    ExportedFiles,
    ForeignFormat,
    ForeignHeads,
    ReadRequest,
    ToExport,
    base_rows,
    check_belongs,
    check_fits,
    checked_against_config,
    config_in,
    named_base,
    shared_changes,
    vllm_command,
)

_MAPS = ("d2t", "t2d")
_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
_LAYER_NAME = re.compile(r"(model\.)?(layers\.0|midlayer)\.")
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_ARCHITECTURE = "LlamaForCausalLMEagle3"
_READ_ARCHITECTURES = (_ARCHITECTURE, "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
_SPECULATORS_TYPE, _SPECULATORS_LAYER = "speculators_model_type", "transformer_layer_config"
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
)
"""Keys of a layer's configuration that are ours too."""
_DEPTH_KEY = "num_speculative_tokens"
"""Our key for the depth of drafts in a plain config.json; engines have a flag for it."""
_DEFAULT_DEPTH = 5
"""How deep heads draft whose checkpoint does not say it, as most do not."""
_REFUSED = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu",),
    "sliding_window": (None,),
    "partial_rotary_factor": (1.0,),
    "parallel_drafting": (False,),
    "model_type": ("llama",),
}
"""Keys of a layer's configuration that change its arithmetic, and this head's values."""

# ------------------------------------------------------------------ out


def _export_plain(request: ToExport) -> ExportedFiles:
    """An EAGLE-3 head in the plain layout."""
    head, weights, changes = _exported(request)
    config = {
        "architectures": [_ARCHITECTURE],
        **_layer_config(head.config, request),
        "base_model_name_or_path": request.base_name,
        **{name: getattr(head.config, name) for name in _FLAGS if getattr(head.config, name)},
        "norm_before_residual": head.config.norm_before_residual,
        _DEPTH_KEY: head.num_heads,
        **_layers_named(head, request.base),
    }
    return ExportedFiles(config, weights, changes)


def _export_speculators(request: ToExport) -> ExportedFiles:
    """An EAGLE-3 head in the layout of speculators, from which vLLM starts without a separate base."""
    head, weights, changes = _exported(request)
    verifier = {"name_or_path": request.base_name, "architectures": [type(request.base).__name__]}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": head.num_heads,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    layer = _layer_config(head.config, request)
    config = {
        "architectures": ["Eagle3DraftModel"],
        _SPECULATORS_TYPE: "eagle3",
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "draft_vocab_size": layer.pop("draft_vocab_size"),
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        **{name: getattr(head.config, name) for name in _FLAGS},
        **_layers_named(head, request.base),
        _SPECULATORS_LAYER: layer,
    }
    weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in weights.items()}
    return ExportedFiles(config, weights, changes)


def _exported(request: ToExport) -> tuple[Eagle3Head, dict[str, Tensor], tuple[str, ...]]:
    """The head, its tensors under the plain layout's names, and what becomes of the rest."""
    check_belongs(request)
    head: Any = request.checkpoint.heads
    state = {name: each for name, each in head.state_dict().items() if name != "token_map"}
    token_map, order = (None, slice(None)) if head.token_map is None else head.token_map.sort()
    if head.config.own_lm_head:
        rows = head.lm_head.weight[order]
    else:
        rows = base_rows(request)
        rows = rows if token_map is None else rows[token_map]
    weights = {**state, "lm_head.weight": rows}
    if token_map is not None:
        token_map = token_map.cpu()
        weights["d2t"] = token_map - torch.arange(len(token_map))
        weights["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill(0, token_map, True)
    return head, weights, tuple(_changes(request, head, weights["lm_head.weight"]))


def _changes(request: ToExport, head: Eagle3Head, rows: Tensor) -> list[str]:
    changes = shared_changes(request)
    if not head.config.own_lm_head:
        changes.append(
            f"the base's rows of {len(rows):,} tokens are written into the file as its lm_head, "
            f"{megabytes(rows.numel() * request.dtype.itemsize)}"
        )
    if any(getattr(head.config, name) for name in _FLAGS):
        names = ", ".join(name for name in _FLAGS if getattr(head.config, name))
        changes.append(f"{names}: vLLM reads these keys, and other engines leave them out")
    if _layers_named(head, request.base):
        layers = " ".join(map(str, head.fused_layers))
        changes.append(
            f"the fused layers {layers} differ from the engines' default, so {_LAYERS_KEY} "
            "names them as vLLM reads it; SGLang adds 1 to each"
        )
    return changes


def _layers_named(head: Eagle3Head, base: CausalLM) -> dict[str, list[int]]:
    """The key of the layers, unless they are every engine's default."""
    try:
        usual = default_layers(base)
    except ValueError:  # too few layers to have any
        usual = None
    return {} if head.fused_layers == usual else {_LAYERS_KEY: list(head.fused_layers)}


def _layer_config(config: Eagle3Config, request: ToExport) -> dict[str, Any]:
    rope = dict(config.rope_parameters)
    theta = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    return {
        "model_type": "llama",
        "num_hidden_layers": 1,
        **{name: getattr(config, name) for name in _SIZES},
        "hidden_act": "silu",
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else {"rope_type": kind, **rope},
        "draft_vocab_size": config.token_map_size or config.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": str(request.dtype).removeprefix("torch."),
    }


def _serve_speculators(directory: str, base: str, num_heads: int) -> str:
    """The command that serves an export, which names the base and the number of tokens itself."""
    return shlex.join(["vllm", "serve", directory])


# ------------------------------------------------------------------ in


def _read_plain(request: ReadRequest) -> ForeignHeads:
    """The head in a directory of the plain layout."""
    path = request.directory / CONFIG_FILE
    config = read_json(path)
    configured = config.get("architectures", [_ARCHITECTURE])
    if not isinstance(configured, list) or len(configured) != 1 or configured[0] not in _READ_ARCHITECTURES:
        raise ValueError(
            f"{path} says architectures={configured!r}, and EAGLE-3 heads of a Llama layer say "
            f"[{_ARCHITECTURE!r}]; other architectures are not read: use the engine that this one is for"
        )
    notes = []
    if config.get(_DEPTH_KEY) is None and request.max_depth is None:
        config[_DEPTH_KEY] = _DEFAULT_DEPTH
        notes.append(
            f"{path.name} does not say how deep the head drafts: {_DEFAULT_DEPTH} is taken; another depth: "
            "--max-depth"
        )
    return _head_of(request, config, notes)


def _read_speculators(request: ReadRequest) -> ForeignHeads:
    """The head in a directory of the speculators layout, as vLLM reads it."""
    path = request.directory / CONFIG_FILE
    config = read_json(path)
    layer = config.get(_SPECULATORS_LAYER)
    if config.get(_SPECULATORS_TYPE) != "eagle3" or not isinstance(layer, dict):
        raise ValueError(
            f"{path} must say {_SPECULATORS_TYPE}='eagle3' and hold {_SPECULATORS_LAYER}, an object; got "
            f"{config.get(_SPECULATORS_TYPE)!r} and {type(layer).__name__}; mend it, or get it again"
        )
    try:
        depth = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
        config["speculators_config"]["verifier"]["name_or_path"]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"{path} must hold speculators_config with proposal_methods, the first of them with "
            "speculative_tokens, and verifier with name_or_path, or vLLM does not start; mend it"
        ) from error
    notes = []
    if "norm_before_residual" not in config:
        notes.append(f"{path} leaves out norm_before_residual, which vLLM then takes for true")
    of_layer = {"model_type": "llama", **layer, _DEPTH_KEY: depth}
    return _head_of(request, {"norm_before_residual": True, **config, **of_layer}, notes)


def _head_of(request: ReadRequest, config: Mapping[str, Any], notes: Sequence[str]) -> ForeignHeads:
    """The head of a directory; ``config`` is its config.json in the plain layout."""
    base = request.base
    path = request.directory / CONFIG_FILE
    key = _DEPTH_KEY
    max_depth = config.get(_DEPTH_KEY)
    if request.max_depth is not None:
        key = "--max-depth"
        max_depth = request.max_depth
    if type(max_depth) is not int or not 1 <= max_depth <= MAX_DEPTH:
        raise ValueError(
            f"{path}: {key} must be an int from 1 to {MAX_DEPTH}, got {max_depth!r:.100}; mend it, or give "
            "the depth: --max-depth"
        )
    tensors, where, layer_name = _tensors(request)
    _check_layer(config, path)
    nested = config.get("eagle_config")
    nested = nested if isinstance(nested, dict) else {}
    if nested.get("use_aux_hidden_state", True) is not True:
        raise ValueError(
            f"{path} says use_aux_hidden_state={nested['use_aux_hidden_state']!r}: such a head reads the "
            "last state only and is no EAGLE-3 head; use the engine that it is for"
        )
    flags = {name: config.get(name, False) for name in _FLAGS}
    flags["norm_before_fc"] = bool(nested.get("norm_before_fc", flags["norm_before_fc"]))
    layers, more = _layers_of(request, config, nested, path)
    size = matrix_shape(tensors, "fc.weight", where)[0]
    vocabulary = len(tensors["t2d"]) if "t2d" in tensors else vocab_size(base)
    wide = matrix_shape(tensors, f"{layer_name}mlp.gate_proj.weight", where)[0]
    held = {
        "num_hidden_layers": 1,
        "hidden_size": size,
        "intermediate_size": wide,
        "vocab_size": vocabulary,
        "draft_vocab_size": len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else None,
        "target_hidden_size": size,
    }
    more += checked_against_config(config, held, path, where, request.trust_tensors)
    for flag, name in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
        if name in tensors and not flags[flag]:
            raise ValueError(
                f"{where} holds {name}, and {path} does not say {flag}: true, without which engines leave it "
                "out; mend config.json"
            )
    token_map = _token_map(tensors, vocabulary, where)
    try:
        ours = Eagle3Config(
            hidden_size=size,
            vocab_size=vocabulary,
            fused_layers=layers,
            num_attention_heads=config.get("num_attention_heads", 32),
            num_key_value_heads=config.get("num_key_value_heads") or config.get("num_attention_heads", 32),
            head_dim=config.get("head_dim") or size // config.get("num_attention_heads", 32),
            intermediate_size=wide,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_parameters=_rope(config),
            max_position_embeddings=config.get("max_position_embeddings", 2048),
            max_depth=max_depth,
            token_map_size=None if token_map is None else len(token_map),
            own_lm_head=_has_own_rows(tensors, token_map, base),
            **flags,
        )
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{path}: {error}; mend it, or get the directory again") from error
    check_fits(where, size, vocabulary, base)
    _check_embeddings(tensors.pop("embed_tokens.weight", None), base, where)
    dtypes = {each.dtype for name, each in tensors.items() if name not in _MAPS}
    head = _loaded(ours, tensors, layer_name, token_map, where)
    return ForeignHeads(head, dtypes.pop() if len(dtypes) == 1 else torch.float32, (*notes, *more))


def _tensors(request: ReadRequest) -> tuple[dict[str, Tensor], Path, str]:
    """The tensors of a directory, their file, and its name for ``midlayer.``.

    The names of the other tensors are the plain layout's.
    """
    stored_tensors = read_model_tensors(
        request.directory, lambda name: "rotary_emb" not in name, integers=_MAPS
    )
    files = {file for file, _ in stored_tensors.values()}
    where = files.pop() if len(files) == 1 else request.directory
    layer = next((match[0] for match in map(_LAYER_NAME.match, stored_tensors) if match), "midlayer.")
    tensors = {
        name if name.startswith(layer) else name.removeprefix("model."): each
        for name, (_, each) in stored_tensors.items()
    }
    return tensors, where, layer


def _check_layer(config: Mapping[str, Any], path: Path) -> None:
    """Raise ValueError where the layer computes something that this head does not."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    settings = {**(rope if isinstance(rope, Mapping) else {}), **config}
    for key, values in _REFUSED.items():
        if settings.get(key, values[0]) not in (*values, None):
            allowed = " or ".join(map(repr, values))
            raise ValueError(
                f"{path} says {key}={settings[key]!r}, and EAGLE-3 heads read here have {allowed}; use the "
                "engine that it was trained for"
            )


def _layers_of(
    request: ReadRequest, config: Mapping[str, Any], nested: Mapping[str, Any], path: Path
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The fused layers, as vLLM takes them from config.json, and notes on decisions."""
    configured: Any = list(request.fused_layers) or config.get(_LAYERS_KEY) or nested.get(_LAYERS_KEY)
    if not configured:
        try:
            layers = default_layers(request.base)
        except ValueError as error:
            raise ValueError(f"{path} names no layers: {error}, or give another base: --base") from error
        return layers, (f"{path.name} names no layers: {' '.join(map(str, layers))} are taken, as by vLLM",)
    where = "--fused-layers" if request.fused_layers else f"{path}: {_LAYERS_KEY}"
    count = request.base.config.get_text_config(decoder=True).num_hidden_layers
    is_list = isinstance(configured, list) and all(type(each) is int for each in configured)
    if (
        not is_list
        or not all(1 <= each <= count for each in configured)
        or len(set(configured)) < len(configured)
    ):
        raise ValueError(
            f"{where} must be different ints from 1 to {count}, the layers of the base model "
            f"{request.base.name_or_path!r}, got {configured!r:.200}; give the base that the head was "
            "trained on, or the layers: --fused-layers"
        )
    notes: tuple[str, ...] = ()
    if request.fused_layers:
        notes = ("the fused layers are the given ones",)
    elif not config.get(_LAYERS_KEY):
        notes = (
            f"{path.name} names layers in eagle_config, which vLLM takes for the states after so many layers "
            "and SGLang for one more; if medusa check shows hardly any acceptance, import again with "
            f"--fused-layers {' '.join(str(each + 1) for each in sorted(configured))}",
        )
    return tuple(sorted(configured)), notes  # vLLM sorts them


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    rope_parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope_parameters, Mapping):
        raise ValueError(f"rope_scaling must be an object, got {rope_parameters!r:.100}")
    known = ("type", "rope_type", "rope_theta", "partial_rotary_factor")
    rest = {key: value for key, value in rope_parameters.items() if key not in known}
    theta = rope_parameters.get("rope_theta", config.get("rope_theta", DEFAULT_THETA))
    kind = rope_parameters.get("rope_type", rope_parameters.get("type", "default"))
    return {"rope_type": kind, "rope_theta": theta, **rest}


def _token_map(tensors: dict[str, Tensor], vocabulary: int, where: Path) -> Tensor | None:
    """The token of each scored row (V',), out of d2t; None where every token is scored."""
    d2t, t2d = (tensors.pop(name, None) for name in _MAPS)
    rows = tensors.get("lm_head.weight")
    if d2t is None:
        if rows is not None and len(rows) != vocabulary:
            raise ValueError(
                f"{where} lacks d2t, and its lm_head scores {len(rows):,} of {vocabulary:,} tokens: which "
                "ones nothing says; get the file again"
            )
        return None
    if d2t.dim() != 1 or d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise ValueError(
            f"{where}: d2t must be one row of ints, got {d2t.dtype} {tuple(d2t.shape)}; get the file again"
        )
    token_map = d2t.long() + torch.arange(len(d2t))
    if rows is None or len(rows) != len(d2t):
        held = "no lm_head.weight" if rows is None else f"an lm_head.weight of {len(rows)} rows"
        raise ValueError(f"{where} holds a d2t of {len(d2t)} tokens and {held}; get the file again")
    try:
        checked_token_map(vocabulary, len(d2t), token_map)
    except ValueError as error:
        raise ValueError(
            f"{where}: d2t does not map to tokens of the base: {error}; give the base that the head was "
            "trained on: --base, or get the file again"
        ) from error
    if t2d is not None and not torch.equal(t2d.bool().nonzero().flatten(), token_map.sort().values):
        raise ValueError(
            f"{where}: d2t and t2d name different tokens; the file is damaged, or holds another run's t2d; "
            "get it again"
        )
    is_everything = len(token_map) == vocabulary and torch.equal(token_map, torch.arange(vocabulary))
    return None if is_everything else token_map


def _has_own_rows(tensors: dict[str, Tensor], token_map: Tensor | None, base: CausalLM) -> bool:
    """Whether lm_head is not the base's own rows; those are taken out of ``tensors``."""
    rows = tensors.get("lm_head.weight")
    if rows is None:
        return False
    embedding = lm_head(base)
    ours = embedding_weight(embedding).detach()
    if not ours.is_floating_point() or getattr(embedding, "bias", None) is not None:
        return True
    if token_map is not None and int(token_map.max()) < len(ours):
        ours = ours[token_map]
    if ours.shape != rows.shape or not torch.equal(rows, ours.to(rows.dtype)):
        return True
    del tensors["lm_head.weight"]
    return False


def _check_embeddings(theirs: Tensor | None, base: CausalLM, where: Path) -> None:
    """Raise ValueError unless token embeddings in the file are the base's, which are then read."""
    ours = base.get_input_embeddings().weight.detach()
    distance = 0.0 if theirs is None else relative_distance(theirs, ours)
    if distance > TOLERANCE:
        raise ValueError(
            f"{where}: embed_tokens.weight is {distance:.1%} away from the embeddings of the base model "
            f"{base.name_or_path!r}; give the base that the head was trained on: --base. Heads with "
            "embeddings of their own are not read"
        )


def _loaded(
    config: Eagle3Config, tensors: dict[str, Tensor], layer: str, token_map: Tensor | None, where: Path
) -> Eagle3Head:
    """The head with these tensors in float32; the file calls ``midlayer.`` as ``layer`` says."""
    with torch.device("meta"):
        head = Eagle3Head(config)
    expected = {name: each.shape for name, each in head.state_dict().items() if name != "token_map"}
    theirs = {name: re.sub(r"^midlayer\.", layer, name) for name in expected}
    shapes = {theirs[name]: shape for name, shape in expected.items()}
    check_tensors(tensors, shapes, "an EAGLE-3 head of one Llama layer", where)
    state = {name: tensors[theirs[name]].to(torch.float32, copy=True) for name in expected}
    if token_map is not None:
        state["token_map"] = token_map
    head.load_state_dict(state, assign=True)
    return head.eval()


# ------------------------------------------------------------------ which is which


def _is_plain_directory(directory: Path) -> bool:
    """Whether ``directory`` says that it holds an EAGLE-3 head in the plain layout."""
    config = config_in(directory)
    named = config.get("architectures")
    is_named = isinstance(named, list) and named[:1] in ([_ARCHITECTURE], ["Eagle3LlamaForCausalLM"])
    return is_named or ("draft_vocab_size" in config and _SPECULATORS_TYPE not in config)


def _is_speculators_directory(directory: Path) -> bool:
    """Whether ``directory`` says that it is in the layout of speculators."""
    return _SPECULATORS_TYPE in config_in(directory)


def _verifier_of(directory: Path) -> str | None:
    """The base that a directory in the layout of speculators names."""
    configured: Any = read_json(directory / CONFIG_FILE)
    for key in ("speculators_config", "verifier", "name_or_path"):
        configured = configured.get(key) if isinstance(configured, dict) else None
    return configured if isinstance(configured, str) and configured else None


VLLM_EAGLE3 = ForeignFormat(
    "vllm-eagle3",
    "vLLM",
    _read_plain,
    named_base,
    _is_plain_directory,
    _export_plain,
    partial(vllm_command, "eagle3"),
    holds=Eagle3Head,
)
SPECULATORS = ForeignFormat(
    "speculators",
    "vLLM",
    _read_speculators,
    _verifier_of,
    _is_speculators_directory,
    _export_speculators,
    _serve_speculators,
    holds=Eagle3Head,
)
