"""The command line: one verb per job; what a verb does is in the file that carries its name.

Help must answer at once, so nothing here imports torch: a verb's module is imported when the verb is run, and the
overview reads the first line of each module's docstring without importing it.
"""

import ast
import importlib
import importlib.util
import os
import pkgutil
import sys
from pathlib import Path

from satlens.errors import SatlensError, UserError
from satlens.log import say

OTHER_VERBS = {
    "sae train": "sae.train_command",
    "sae label": "sae.label_command",
    "judge calibrate": "sae.calibrate_command",
    "bench train": "satlens.efficiency.train_command",
    "bench forward": "satlens.efficiency.forward_command",
    "data": "satlens.training.data_command",
    "train": "satlens.training.train_command",
    "report": "satlens.report.command",
    "figures": "satlens.plots.command",
}
OK, FAILED, MISTAKE, INTERRUPTED = 0, 1, 2, 130


def verbs() -> dict[str, str]:
    """Verb -> module. The folder `analyses` is the registry: a file there is a verb."""
    import analyses

    found = {
        info.name.replace("_", "-"): f"analyses.{info.name}"
        for info in pkgutil.iter_modules(analyses.__path__)
        if not info.ispkg
    }
    return {**found, **OTHER_VERBS}


def overview(group: str = "") -> str:
    """What `satlens --help` prints; `group` keeps only the verbs that begin with that word."""
    lines = ["usage: satlens VERB [flags]      satlens VERB --help for flags and examples", ""]
    shown = {verb: module for verb, module in verbs().items() if not group or verb.split()[0] == group}
    width = max(map(len, shown))
    lines += [f"  {verb:<{width}} {_first_line(module)}" for verb, module in shown.items()]
    lines += [
        "",
        "exit codes: 0 done, 1 failed, 2 your mistake (the message says what to do), 130 interrupted",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run one verb; prints the paths it made, one a line, and returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return OK
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(version("satlens"))
        return OK
    verb, rest = _split(arguments)
    if verb in _groups() and rest in (["-h"], ["--help"]):
        print(overview(verb))
        return OK
    try:
        return _run(verb, rest)
    except UserError as error:
        say(f"satlens: {error}")
        return MISTAKE
    except SatlensError as error:
        say(f"satlens: {error}")
        return FAILED
    except KeyboardInterrupt:
        say("satlens: interrupted")
        return INTERRUPTED
    finally:
        _leave_processes()


def _split(arguments: list[str]) -> tuple[str, list[str]]:
    """The verb, which may be two words, and what follows it."""
    words = 2 if arguments[0] in _groups() and len(arguments) > 1 and arguments[1][:1] != "-" else 1
    return " ".join(arguments[:words]), arguments[words:]


def _groups() -> set[str]:
    """First words of the verbs that have two."""
    return {verb.split()[0] for verb in OTHER_VERBS if " " in verb}


def _run(verb: str, arguments: list[str]) -> int:
    known = verbs()
    if verb not in known:
        import difflib

        close = difflib.get_close_matches(verb, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"no verb {verb!r}{hint} (there are: {', '.join(known)})")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import tyro

    module = importlib.import_module(known[verb])
    description = (module.__doc__ or "").strip()
    config = tyro.cli(
        module.Config,
        prog=f"satlens {verb}",
        description=description,
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    made = module.run(config)
    for path in made if isinstance(made, list) else [made]:
        if path is not None:
            print(path)
    return OK


def _leave_processes() -> None:
    """End the process group of a launch, if this command joined one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _first_line(module: str) -> str:
    """The first sentence of a module's docstring, read without importing it."""
    path = _source(module)
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return doc.split("\n", 1)[0]


def _source(module: str) -> Path:
    package, name = module.rsplit(".", 1)
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / f"{name}.py"


if __name__ == "__main__":
    sys.exit(main())
