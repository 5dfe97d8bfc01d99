"""The reference pair that ships with the package: a small SATFormer, its Transformer twin, and held-out text."""

from pathlib import Path

from satlens.errors import UserError

FOLDER = Path(__file__).parent
MODELS = {"reference-satformer": "satformer", "reference-transformer": "transformer"}
TEXT = FOLDER / "text" / "heldout.bin"


def resolve(model: str) -> Path:
    """A model's folder: one of the shipped names, or a path.

    Raises:
        UserError: a shipped name whose files are not there.
    """
    if model not in MODELS:
        return Path(model)
    folder = FOLDER / MODELS[model]
    if not (folder / "config.json").exists():
        raise UserError(f"{model} is not in this installation; rebuild it with `make reference`")
    return folder


def title(model: str) -> str:
    """The name a model goes by: a shipped one, or its folder's, with the run's where that is only ``final``.

    Two models of a comparison would otherwise both be called final.
    """
    if model in MODELS:
        return model
    path = Path(model).resolve()
    return f"{path.parent.name}/{path.name}" if path.name in ("final", "latest") else path.name
