"""The options of programs: dataclasses that the command line and a YAML file fill; and programs to run next.

A program's options are one frozen dataclass, made of its own fields and of the groups below. The name
of a field is its flag (``max_new_tokens`` is ``--max-new-tokens``), the line under a field is its help,
and each dataclass checks its own values in ``__post_init__``. :func:`parse` does the rest; it knows
nothing about any single option.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from medusa.assets import DEFAULT_HEADS, named_file
from medusa.console import log_console, print_list
from medusa.files import read_yaml
from medusa.options import (
    DrafterSettings,
    Dtype,
    Engine,
    StepKind,
    TemplateOptions,
    check_at_least,
    check_within,
)

EMBEDDED_HEADS = "smollm2-135m-instruct"
"""The heads that ship for the embedded base."""
NO_HEADS = "none"
"""Names no heads, where heads are named."""
EMBEDDED_PROMPTS = "demo_heldout"
"""The prompts that ship and that `make demo` is measured on."""

_ABOUT_CONFIG = (
    "Flags can also come from a YAML file, as `max_new_tokens: 64`: --config FILE.\n"
    "In the names of flags _ and - mean the same.\n"
    "Names from `medusa configs` can be used in place of paths."
)

T = TypeVar("T")


def parse(
    options: type[T],
    arguments: Sequence[str] | None = None,
    *,
    description: str | None = None,
    prog: str | None = None,
    presets: Callable[[], Mapping[str, Any]] = dict,
) -> T:
    """An instance of the dataclass ``options`` from ``arguments`` (by default the command line's).

    ``--config FILE`` names a YAML file whose keys are flags with underscores. Values of the file replace
    defaults, and the command line wins. The file wins over values of ``presets``. ``--key none`` takes back
    an optional key of the file. A flag that takes several values may be given several times on the command
    line.

    Args:
        description: the text that ``--help`` shows first, unchanged; by default the docstring of ``options``.

    Raises:
        SystemExit: after ``--help`` (status 0), or after a sentence on standard error about an unknown
            key, a value that cannot be used, or a file that cannot be read (status 2).
    """
    flags = flag_types(options)
    content: Any = {}
    try:
        file, words = _without_config(sys.argv[1:] if arguments is None else arguments)
        words = [_current_flag(word, flags) for word in words]
        _check_known(words, flags)
        words = _gathered(_switches(words, flags), flags)
        values = _values(presets(), flags, "presets")
        if file is not None:
            file = named_file(file, ".yaml", "configuration file")
            content = read_yaml(file)
            if not isinstance(content, dict):
                raise ValueError(f"{file} must hold keys and values, got {type(content).__name__}")
            values |= _values(content, flags, str(file))
    except (ValueError, FileNotFoundError) as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from error
    if {"-h", "--help"} & set(words):
        text = inspect.getdoc(options) if description is None else description
        sys.stdout.write(f"{(text or '').rstrip()}\n\n{_ABOUT_CONFIG}\n\n")
        sys.stdout.flush()
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            return tyro.cli(
                options,
                prog=prog or Path(sys.argv[0]).name,
                args=words,
                default=_instance(options, values),
                description="",
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.PositionalMetavarFromFieldName),
                registry=_REGISTRY,
            )
    except SystemExit as ended:
        refusal = _broken_rule(ended)
        sys.stderr.write(messages.getvalue() if refusal is None else f"error: {refusal}\n")
        if ended.code and file is not None:
            sys.stderr.write(f"({_about_file(file, content, words, str(refusal or ''))})\n")
        raise


def _broken_rule(ended: SystemExit) -> ValueError | None:
    """The error of the options' own checks that ended the parser; None where it refused a word itself."""
    cause = ended.__context__
    if cause is not None and isinstance(getattr(cause, "arg", None), str):  # the name of a group
        cause = cause.__context__
    return cause if isinstance(cause, ValueError) else None


def _about_file(file: Path, content: Mapping[str, Any], words: Sequence[str], refusal: str) -> str:
    """The part that ``file`` has in a refusal: the keys of it that the refusal is about."""
    flags = {word.partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    keys = [
        str(key)
        for key in content
        if f"__{RENAMED.get(key, key)}" not in flags and re.search(rf"\b{re.escape(str(key))}\b", refusal)
    ]
    if not keys:
        return f"the keys of {file} take the place of defaults"
    return f"{' and '.join(keys)} in {file}: change that there, or give --{keys[0].replace('_', '-')}"


def flag_types(options: type) -> dict[str, Any]:
    """Name (with underscores) and type of every flag of a dataclass, including its groups."""
    types = get_type_hints(options, include_extras=True)
    flags: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        kind = types[field.name]
        if dataclasses.is_dataclass(kind):
            flags |= flag_types(kind)  # type: ignore[arg-type]
        elif tyro.conf.Positional not in getattr(kind, "__metadata__", ()):
            flags[field.name] = kind
    return flags


def to_argv(options: Any, defaults: Any = None) -> list[str]:
    """The words of a command line that :func:`parse` reads as ``options``: positional words, then each flag
    that differs from ``defaults``, by default the class's."""
    positional = list[str]()
    flags = list[str]()
    types = get_type_hints(type(options), include_extras=True)
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        name = f"--{field.name.replace('_', '-')}"
        default = getattr(defaults, field.name) if defaults is not None else _default(field)
        values = list(map(str, value)) if isinstance(value, list | tuple) else [str(value)]
        if dataclasses.is_dataclass(value):
            flags += to_argv(value, None if default is dataclasses.MISSING else default)
        elif tyro.conf.Positional in getattr(types[field.name], "__metadata__", ()):
            positional += [] if value is None else values
        elif value != default:
            switch = name if value else f"--no-{name[2:]}"
            flags += [switch] if isinstance(value, bool) else [name, *(["none"] if value is None else values)]
    return [*positional, *flags]


NUMBERS: Mapping[Any, str] = {int: "a whole number", float: "a number"}
"""Words for the types of numbers, in errors about a value."""
RENAMED = {"contenders": "systems", "race": "allow_plain", "remember": "suffix_cache_mib"}
"""Flags and keys of earlier versions that still work, and their current names."""


def _current_flag(word: str, flags: Mapping[str, Any]) -> str:
    """``word`` of a command line, or the current name of the flag that it is."""
    name, *value = word.split("=", 1)
    now = RENAMED.get(name.removeprefix("--"), "") if name[:2] == "--" else ""
    return "=".join([f"--{now.replace('_', '-')}", *value]) if now in flags else word


ELSEWHERE = {"model": "base", "max_tokens": "max_new_tokens", "temp": "temperature"}
"""Flags of other programs, and what they are called here."""


def _check_known(words: Sequence[str], flags: Mapping[str, Any]) -> None:
    """Refuse a flag that is none of ``flags``, and name the one that may be meant."""
    names = {name.rstrip("_") for name in flags}  # as_, for --as
    for word in words:
        name = word.partition("=")[0]
        key = name[2:].replace("-", "_")
        if not name.startswith("--") or key in (*names, "", "help") or key.removeprefix("no_") in names:
            continue
        meant = ELSEWHERE.get(key, "")
        nearest = [meant] if meant in names else difflib.get_close_matches(key, names, n=1, cutoff=0.6)
        advice = f"did you mean --{nearest[0].replace('_', '-')}?" if nearest else "--help lists every option"
        raise ValueError(f"unknown option {name}; {advice}")


def _default(field: dataclasses.Field) -> Any:
    """The value of an option that nobody gives; MISSING where somebody must."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _without_config(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The file that ``--config`` names, and the other words."""
    words = [
        part for word in arguments for part in (word.split("=", 1) if word[:9] == "--config=" else [word])
    ]
    if "--config" not in words:
        return None, words
    at = words.index("--config")
    if len(words) < at + 2 or "--config" in words[at + 1 :]:
        raise ValueError("--config takes one file and is given once")
    return Path(words[at + 1]), [*words[:at], *words[at + 2 :]]


def _values(values: Mapping[str, Any], flags: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``values`` as the types of their ``flags`` have them: read as the command line's words are."""
    parsed: dict[str, Any] = {}
    for key, value in values.items():
        key = RENAMED[key] if RENAMED.get(key) in flags else key
        if key not in flags:
            nearest = difflib.get_close_matches(str(key), flags, n=1, cutoff=0.6)
            advice = f"did you mean {nearest[0]!r}?" if nearest else "--help lists every key"
            raise ValueError(f"unknown key {key!r} in {where}; {advice}")
        if flags[key] is bool:
            if not isinstance(value, bool):
                raise ValueError(f"{key} in {where} must be true or false, got {value!r}")
            parsed[key] = value
            continue
        values_given = value if isinstance(value, list) else [value]
        with _REGISTRY:
            spec: Any = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(flags[key], set()))
        is_nested = any(isinstance(each, list | dict) for each in values_given)
        is_missing = value is None and not _optional(flags[key])
        if is_nested or is_missing or (spec.nargs == 1 and len(values_given) != 1):
            raise ValueError(f"{key} in {where} must have a plain value, got {value!r}")
        words = [str(each) for each in values_given]
        alone = _alone(flags[key]) if isinstance(value, bool) else None
        if alone:
            words = [alone[str(value).lower()]]
        choices = [*map(str.lower, spec.choices or ()), "none"]
        if spec.choices and any(word.lower() not in choices for word in words):
            raise ValueError(f"{key} in {where} must be one of {', '.join(spec.choices)}, got {value!r}")
        try:
            parsed[key] = spec.instance_from_str(words)
        except ValueError as error:
            rule = NUMBERS.get(_optional(flags[key]) or flags[key])
            reason = f"cannot be {value!r}: {error}" if rule is None else f"must be {rule}, got {value!r}"
            raise ValueError(f"{key} in {where} {reason}; change it there") from error
    return parsed


def _instance(options: type[T], values: Mapping[str, Any], defaults: Any = None) -> T:
    """``options`` with ``values`` by their flags, else as in ``defaults``, by default the class's.

    Nothing is checked yet: missing values are MISSING, for the parser to take from the command line.
    """
    instance = object.__new__(options)
    types = get_type_hints(options)
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        value = _default(field) if defaults is None else getattr(defaults, field.name)
        kind = types[field.name]
        if dataclasses.is_dataclass(kind):
            value = _instance(kind, values, None if value is dataclasses.MISSING else value)  # type: ignore
        else:
            value = values.get(field.name, value)
        object.__setattr__(instance, field.name, tyro.MISSING if value is dataclasses.MISSING else value)
    return instance


def _switches(words: Sequence[str], flags: Mapping[str, Any]) -> list[str]:
    """``words`` with `--flag` and `--no-flag` for `--flag true` and `--flag false`, and with `--flag=WORD`
    for a flag whose word is optional."""
    kept: list[str] = []
    for word in words:
        key, _, value = word[2:].partition("=") if word.startswith("--") else ("", "", "")
        key = key.replace("-", "_")
        name = key if key in flags else key.removeprefix("no_")
        alone = _alone(flags.get(name))
        if alone:
            word_given = value or ("true" if name == key else "false")
            kept.append(f"--{name}={alone.get(word_given.lower(), word_given)}")
            continue
        if value and flags.get(key) is bool:
            kept.append(f"--{key}")
            word = value
        before = kept[-1] if kept else ""
        flag = before.partition("=")[0]
        alone = _alone(flags.get(flag[2:]))
        takes_any = "never" in alone.values() and word[:1] != "-"
        if alone and before == f"{flag}={alone['true']}" and (takes_any or word.lower() in alone):
            kept[-1] = f"{flag}={alone.get(word.lower(), word)}"
        elif word.lower() in ("true", "false") and flags.get(before[2:].replace("-", "_")) is bool:
            kept[-1] = before if word.lower() == "true" else f"--no-{before[2:]}"
        else:
            kept.append(word)
    return kept


def _gathered(words: Sequence[str], flags: Mapping[str, Any]) -> list[str]:
    """``words`` with all values of a list after its first flag: the parser would take only the last flag."""
    groups: list[list[str]] = [[]]  # a flag and its values
    for word in words:
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    lists: dict[str, list[str]] = {}
    for group in groups[1:]:
        flag, is_joined, value = group[0].partition("=")
        key = flag[2:].replace("-", "_")
        if not _is_list(flags.get(key)):
            continue
        values = [*([value] if is_joined else []), *group[1:]]
        if not values:
            raise ValueError(f"{flag} must have a value, got none; leave it out or name one")
        first = lists.setdefault(key, group)
        if first is not group:
            first += values
            group.clear()
    return [word for group in groups for word in group]


def _is_list(kind: Any) -> bool:
    while get_origin(kind) is Annotated or _optional(kind) is not None:
        kind = get_args(kind)[0] if get_origin(kind) is Annotated else _optional(kind)
    return get_origin(kind) is list or (get_origin(kind) is tuple and get_args(kind)[1:] == (...,))


def _alone(kind: Any) -> dict[str, str]:
    """The words for true and false of a flag of this type whose word is optional, such as always and never,
    or none; empty for flags of other types."""
    if {"always", "never"} <= set(get_args(kind)):
        return {"true": "always", "false": "never"}
    if _optional(kind) is bool:
        return {"true": "True", "false": "False", "none": "none", "null": "none"}
    return {}


def _optional(kind: Any) -> Any | None:
    """X for the type ``X | None``; None for other types."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) not in (Union, UnionType) or NoneType not in get_args(kind):
        return None
    others = [each for each in get_args(kind) if each is not NoneType]
    return others[0] if len(others) == 1 else None


_REGISTRY = ConstructorRegistry()


@_REGISTRY.primitive_rule
def _read_optional(info: PrimitiveTypeInfo) -> Any:
    """Read ``X | None`` as X is read, and `none` as None."""
    kind = _optional(info.type)
    if kind is None:
        return None
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, info.markers))
    if not isinstance(spec, PrimitiveConstructorSpec):
        return spec
    return dataclasses.replace(
        spec,
        choices=spec.choices and (*spec.choices, "none"),
        instance_from_str=lambda words: (
            None
            if [word.lower() for word in words] in (["none"], ["null"])
            else spec.instance_from_str(words)
        ),
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda value: ["none"] if value is None else spec.str_from_instance(value),
    )


def _growing(text: str) -> tuple[int, ...]:
    numbers = tuple(sorted({int(part) for part in text.split(",")}))
    if numbers[0] < 1:
        raise ValueError(f"must be at least 1, got {numbers[0]}")
    return numbers


GrowingInts = Annotated[
    tuple[int, ...],
    PrimitiveConstructorSpec(
        nargs="*",
        metavar="N,N,...",
        instance_from_str=lambda words: _growing(",".join(words)),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(map(str, value))],
    ),
]
"""Whole numbers of at least 1 with commas or spaces between; read sorted, each once."""


@dataclass(frozen=True)
class ModelOptions:
    """Which model to load, and how to run it."""

    base: str | None = None
    """Base model: a directory, a GGUF file, a hub id, as owner/name, owner/name@revision or, for a GGUF file
    there, owner/name:Q4_K_M, or smollm2-135m-instruct, which `medusa fetch` fetches; none is the one that the
    heads were trained on."""
    tokenizer: str | None = None
    """Tokenizer, as the base is named; none is the base's own."""
    heads: str = DEFAULT_HEADS
    """Heads trained on that base: a directory, a hub id as above, or the name of heads that ship; mtp are the
    base's own layers for multi-token prediction. default are the heads that were learned for the base
    (`medusa learn`), else those that ship for it, else its own layers; where it has none, drafts come from
    suffix matching, as with none."""
    trust_remote_code: bool = False
    """Run the code that the base's repository comes with, which can do anything; for models that are not part
    of transformers."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto is cuda where there is one."""
    dtype: Dtype | None = None
    """Precision of the base; none is float32 on a CPU and the checkpoint's own elsewhere. Only float32
    promises exactly the tokens of plain decoding: lower precision can flip near-ties."""
    engine: Engine = "auto"
    """eager: as loaded. packed: kernels made for this CPU, every weight as it is; on a card kernels that no
    card has run yet. auto: packed where it applies, on a CPU. int8: the same with weights in int8, faster,
    but another model with a text of its own. A GGUF file that is quantised keeps its own numbers; auto and
    int8 round what they are multiplied with to 8 bits, as llama.cpp does, and packed does not."""
    step: StepKind | None = None
    """How steps run. compiled: layers and drafts compiled for this machine, a minute once, then the fastest
    on a CPU. general: nothing is compiled. static: fixed shapes that never wait for the host. captured: those
    as CUDA graphs. auto: captured on a card where the drafter and the call allow it, else general. None is
    compiled with engine packed or int8, auto elsewhere."""
    threads: int | None = None
    """Threads that compute on a CPU. None is OMP_NUM_THREADS, or the cores that this process may use, the
    limits of its container included."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "threads")

    @property
    def named_heads(self) -> str | None:
        """The heads that are meant; None for no heads."""
        if self.heads != DEFAULT_HEADS:
            return None if self.heads == NO_HEADS else self.heads
        if self.base is None:
            return EMBEDDED_HEADS
        from medusa.base.known_models import heads_that_fit

        return heads_that_fit(self.base)

    @property
    def required_heads(self) -> str:
        """The heads that are meant.

        Raises:
            ValueError: there are none.
        """
        named = self.named_heads
        if named is None:
            raise ValueError(
                f"this command is about heads, and base {self.base!r} has got none; give --heads, or train "
                f"some: {how_to_train(self.base)}"
            )
        return named


@dataclass(frozen=True)
class PromptOptions(TemplateOptions):
    """The prompts to answer."""

    prompts: Path | None = None
    """JSON lines, each with `prompt`, `turns` or `messages`, and `category` if you like; or the name of
    prompts that ship, as `medusa configs` lists them. None is demo_heldout."""
    limit: int | None = None
    """Number of prompts to take from the start of the file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "limit")


@dataclass(frozen=True)
class AnswerOptions:
    """How to answer."""

    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    temperature: float = 0.0
    """0 is greedy; above 0, tokens are sampled."""
    seed: int = 0
    """Seed of sampling: the same seed gives the same tokens, with heads or without."""
    top_k: int | None = None
    """Sample from this number of likeliest tokens; none is the value of the model's configuration."""
    top_p: float | None = None
    """Sample from the likeliest tokens whose probabilities add up to this."""
    min_p: float | None = None
    """Leave out tokens that are less than this times as likely as the likeliest one."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_new_tokens", "top_k")
        check_at_least(self, 0, "temperature")
        check_within(self, "(0, 1]", "top_p")
        check_within(self, "[0, 1]", "min_p")
        if self.temperature == 0:
            for name in ("top_k", "top_p", "min_p"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} goes with sampling, and temperature is 0 (greedy); give both")

    @property
    def sampling(self) -> dict[str, Any]:
        """For ``generate``, ours and ``transformers``': greedy or sampled, and from which tokens."""
        parameters = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        return {"do_sample": self.temperature > 0} | {name: each for name, each in parameters.items() if each}


@dataclass(frozen=True)
class ReportOptions:
    """The files that a program writes."""

    json: Path | None = None
    """Write the closing report, one JSON object, to this file; - is standard output. Where none is named and
    standard output is no terminal, the report is its last line."""


@dataclass(frozen=True, kw_only=True)
class ProgramOptions:
    """The options that all programs which decode share; each adds its own."""

    model: ModelOptions = ModelOptions()
    prompts: PromptOptions = PromptOptions()
    answers: AnswerOptions = AnswerOptions()
    report: ReportOptions = ReportOptions()


def command(name: str, *words: object) -> str:
    """``medusa NAME WORD ...`` as a shell reads it."""
    return shlex.join(["medusa", name, *map(str, words)])


def answer_command(tokenizer: Any, *words: object) -> str:
    """The command that answers, with this tokenizer: see :func:`asking_command`."""
    return asking_command(tokenizer.chat_template is not None, *words)


def asking_command(has_template: bool, *words: object) -> str:
    """The command that answers: ``medusa chat``, or ``medusa generate`` where the base has no chat template
    and continues text."""
    return command("chat", *words) if has_template else command("generate", *words, "Once upon a time")


def how_to_train(base: str | None) -> str:
    """The command that trains heads for ``base``."""
    return command("learn", base or EMBEDDED_HEADS)


def print_next(commands: Sequence[str]) -> None:
    """End with ``commands``: next steps, ready to be pasted."""
    own = _own_name()
    print_list(log_console(), "next:", [re.sub("^medusa ", f"{own} ", line) for line in commands])


def _own_name() -> str:
    """The shell command of this installation's ``medusa``: its path, where the name finds none or another."""
    script = Path(sys.executable).with_name("medusa")
    command_path = shutil.which("medusa")
    if not script.is_file() or (command_path is not None and script.samefile(command_path)):
        return "medusa"
    return shlex.quote(os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script))


def answer_with(tokenizer: Any, drafter: str, model: ModelOptions, drafters: DrafterSettings) -> str:
    """The command that answers with this drafter, as measurements call it."""
    which = {"plain": ["--plain"], "default": []}.get(drafter, ["--drafter", drafter])
    return answer_command(tokenizer, *which, *to_argv(model), *to_argv(drafters.read_by(drafter)))
