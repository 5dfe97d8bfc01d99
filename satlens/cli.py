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
        info.name: f"analyses.{info.name}"
        for info in pkgutil.iter_modules(analyses.__path__)
        if not info.ispkg
    }
    return {**found, **OTHER_VERBS}


def overview() -> str:
    """What `satlens --help` prints."""
    lines = ["usage: satlens VERB [flags]      satlens VERB --help for flags and examples", ""]
    for verb, module in verbs().items():
        lines.append(f"  {verb:<10} {_first_line(module)}")
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
    try:
        return _run(arguments[0], arguments[1:])
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
