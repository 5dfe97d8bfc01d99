"""Which tasks there are: the paper's zero-shot and retrieval sets, what each needs, and what the paper reports."""

import difflib
from dataclasses import dataclass

from satlens.errors import UserError

CONTEXT_FIELDS = ("context", "question", "answers")
PROMPT_FIELDS = ("text", "value")


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task: a data set, and who says how it is asked."""

    name: str
    """What `--tasks` calls it, and the name of its local copy."""
    hub: str
    """The data set on the hub (and its configuration, after a colon)."""
    fields: tuple[tuple[str, ...], ...]
    """Fields a document needs; where there are two lists, either will do."""
    definition: str | None = None
    """Folder and name of the harness's own definition; None for the cloze protocol, which is ours."""
    paper: tuple[str, ...] = ()
    """Metrics the paper reports."""

    @property
    def cloze(self) -> bool:
        """Whether the answer is generated and looked for (Arora et al. 2024)."""
        return self.definition is None


_CHOICES = ("question", "choices", "answerKey")
_ZERO_SHOT = (
    Task(
        name="wikitext",
        hub="EleutherAI/wikitext_document_level:wikitext-2-raw-v1",
        fields=(("page",),),
        definition="wikitext/wikitext",
        paper=("word_perplexity",),
    ),
    Task(
        name="lambada",
        hub="EleutherAI/lambada_openai:default",
        fields=(("text",),),
        definition="lambada/lambada_openai",
        paper=("perplexity", "acc"),
    ),
    Task(
        name="piqa",
        hub="baber/piqa",
        fields=(("goal", "sol1", "sol2", "label"),),
        definition="piqa/piqa",
        paper=("acc",),
    ),
    Task(
        name="hellaswag",
        hub="Rowan/hellaswag",
        fields=(("activity_label", "ctx_a", "ctx_b", "endings", "label"),),
        definition="hellaswag/hellaswag",
        paper=("acc_norm",),
    ),
    Task(
        name="winogrande",
        hub="allenai/winogrande:winogrande_xl",
        fields=(("sentence", "option1", "option2", "answer"),),
        definition="winogrande/winogrande",
        paper=("acc",),
    ),
    Task(
        name="arc-easy",
        hub="allenai/ai2_arc:ARC-Easy",
        fields=(_CHOICES,),
        definition="arc/arc_easy",
        paper=("acc",),
    ),
    Task(
        name="arc-challenge",
        hub="allenai/ai2_arc:ARC-Challenge",
        fields=(_CHOICES,),
        definition="arc/arc_challenge",
        paper=("acc_norm",),
    ),
    Task(
        name="siqa",
        hub="lighteval/siqa",
        fields=(("context", "question", "answerA", "answerB", "answerC", "label"),),
        definition="siqa/social_iqa",
        paper=("acc",),
    ),
    Task(
        name="boolq",
        hub="aps/super_glue:boolq",
        fields=(("passage", "question", "label"),),
        definition="super_glue/boolq",
        paper=("acc",),
    ),
)
_RETRIEVAL = tuple(
    Task(name=name, hub=f"hazyresearch/{hub}", fields=(CONTEXT_FIELDS, PROMPT_FIELDS), paper=("contains",))
    for name, hub in {
        "triviaqa": "based_triviaqa",
        "swde": "based-swde-v2",
        "squad": "based-squad",
        "nq": "based_nq_2048",
        "fda": "based-fda",
        "drop": "based_drop",
    }.items()
)
TASKS = {task.name: task for task in (*_ZERO_SHOT, *_RETRIEVAL)}
SETS = {
    "zero-shot": tuple(task.name for task in _ZERO_SHOT),
    "retrieval": tuple(task.name for task in _RETRIEVAL),
}


def named(names: tuple[str, ...]) -> list[Task]:
    """The tasks of sets and single names, each once, in the order given.

    Raises:
        UserError: a name that is neither.
    """
    wanted: dict[str, Task] = {}
    for name in names:
        for member in SETS.get(name, (name,)):
            if member not in TASKS:
                known = [*SETS, *TASKS]
                close = difflib.get_close_matches(member, known, n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise UserError(f"no task {member!r}{hint} (there are: {', '.join(known)})")
            wanted[member] = TASKS[member]
    if not wanted:
        raise UserError(f"no task given: name some of {', '.join([*SETS, *TASKS])}")
    return list(wanted.values())
