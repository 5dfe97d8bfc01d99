"""A preset is the paper's scale joined with an architecture, and the six of a scale differ in nothing else."""

from pathlib import Path

import pytest
import torch

from satlens.cli import main
from satlens.errors import UserError
from satlens.hf import GATES, MODELS
from satlens.training.preset import architectures, preset, scales
from satlens.training.recipe import Recipe, new_recipe

PLACES = {"data": "d", "out": "o"}
SIZES = ("hidden_size", "num_hidden_layers", "num_heads", "intermediate_size")
# Table 1, and appendix B.2 for the thin one; tokens and rates are of section 4
PAPER = {
    "small": ((768, 11, 12, 3072), 5e9, 1e-3),
    "medium": ((1024, 18, 16, 4096), 10e9, 1.5e-3),
    "large": ((1536, 19, 24, 6144), 20e9, 2e-3),
    "xl": ((2048, 24, 32, 5632), 30e9, 8e-4),
    "thin": ((1536, 24, 16, 4352), 20e9, 2e-3),
}


def recipe(scale: str, arch: str, gate: str | None = None) -> Recipe:
    return new_recipe({**preset(scale, arch, gate), **PLACES}, "preset")


def model_of(given: Recipe) -> torch.nn.Module:
    model = MODELS[given.arch]
    with torch.device("meta"):
        return model(model.config_class(**given.model, vocab_size=32000))


def test_there_are_six_architectures_at_every_scale() -> None:
    assert scales() == ("large", "medium", "reference", "small", "study", "study-thin", "thin", "xl")
    assert (
        len(architectures()) == len(MODELS) == len({recipe("small", arch).arch for arch in architectures()})
    )


@pytest.mark.parametrize("scale", PAPER)
def test_sizes_tokens_and_rate_are_the_papers(scale: str) -> None:
    sizes, tokens, rate = PAPER[scale]
    for arch in architectures():
        given = recipe(scale, arch)
        assert tuple(given.model[name] for name in SIZES) == sizes
        assert (given.max_tokens, given.lr, given.seq_length) == (tokens, rate, 4096)
        assert (given.weight_decay, given.grad_clip, given.warmup_ratio, given.min_lr_ratio) == (
            0.1,
            1.0,
            0.01,
            0.1,
        )


@pytest.mark.parametrize("scale", scales())
def test_models_of_a_scale_are_trained_alike(scale: str) -> None:
    seen = [recipe(scale, arch).as_dict() for arch in architectures()]
    for given in seen:
        given.pop("arch")
        given["model"] = {name: given["model"][name] for name in (*SIZES, "qk_norm", "tie_word_embeddings")}
    assert all(given == seen[0] for given in seen)


@pytest.mark.parametrize("arch", architectures())
def test_the_sizes_of_a_scale_are_near_what_the_paper_calls_them(arch: str) -> None:
    for scale, millions in (("small", 130), ("large", 760), ("thin", 760)):
        count = sum(p.numel() for p in model_of(recipe(scale, arch)).parameters()) / 1e6
        assert count == pytest.approx(millions, rel=0.04), (arch, scale)


def test_the_reference_scale_is_the_shipped_pairs_recipe() -> None:
    from satlens.training.preset import FOLDER
    from satlens.training.recipe import read_recipe

    for arch in ("satformer", "transformer"):
        shipped = read_recipe(FOLDER / f"reference-{arch}.toml")
        assert recipe("reference", arch).as_dict() == shipped.as_dict()


def test_rivals_are_the_variants_that_the_paper_names() -> None:
    dense, hyper = recipe("small", "denseformer").model, recipe("small", "hyperconnections").model
    assert (dense["dwa_dilation"], dense["dwa_period"]) == (4, 5)
    assert (hyper["expansion_rate"], hyper["hc_norm_type"], hyper["use_tanh"]) == (2, "layer", True)


@pytest.mark.parametrize("gate", GATES)
def test_every_gate_has_a_preset(gate: str) -> None:
    given = recipe("reference", "satformer", gate)
    assert MODELS[given.arch].config_class(**given.model).value_residual_gate == gate


def test_a_gate_for_a_model_without_one_is_refused() -> None:
    with pytest.raises(UserError, match="resformer has no gate"):
        preset("small", "resformer", "relu")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--preset", "huge", "--arch", "satformer", "--data", "d", "--out", "o"], "no scale 'huge'"),
        (["--preset", "small", "--arch", "mamba", "--data", "d", "--out", "o"], "no architecture 'mamba'"),
        (["--preset", "small", "--data", "d", "--out", "o"], "both --preset and --arch"),
        (["--preset", "small", "--arch", "satformer"], "needs --data"),
        ([], "give a recipe file, or --preset"),
        (["r.toml", "--preset", "small", "--arch", "satformer"], "give a recipe file, or --preset"),
        (["r.toml", "--gate", "relu"], "--gate belongs to presets"),
        (
            ["--preset", "small", "--arch", "satformer", "--gate", "step", "--data", "d", "--out", "o"],
            "no finished",
        ),
    ],
)
def test_a_mistake_in_the_flags_is_one_line(
    flags: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *flags]) == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said
