"""A recipe means what the paper's recipe says, and a wrong one is refused by the name of its field."""

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from satlens.errors import UserError
from satlens.training.recipe import Recipe, read_recipe

PRESETS = Path(__file__).parents[1] / "satlens" / "training" / "presets"


def recipe(**changes: Any) -> Recipe:
    """100 steps of 1,000 tokens, 10 of them warm-up, on one process."""
    given = {
        "arch": "SATFormer",
        "data": Path("d"),
        "out": Path("o"),
        "max_tokens": 100_999,
        "seq_length": 50,
        "batch_size": 10,
        "accumulation": 2,
        "lr": 4e-3,
        "min_lr_ratio": 0.25,
        "warmup_ratio": 0.1,
    }
    return Recipe(**{**given, **changes})


def write(folder: Path, **changes: Any) -> Path:
    """A TOML recipe; a field set to None is left out."""
    given = {"arch": "SATFormer", "data": "d", "out": "o", "max_tokens": 1000, **changes}
    lines = [f"{key} = {value!r}" for key, value in given.items() if value is not None]
    path = folder / "recipe.toml"
    path.write_text("\n".join(lines).replace("True", "true"))
    return path


def test_steps_are_whole_and_count_every_process() -> None:
    assert recipe().tokens_per_step(1) == 1000
    assert recipe().max_steps(1) == 100
    assert recipe().max_steps(3) == 33


def test_warm_up_rises_in_equal_steps_to_the_peak() -> None:
    rates = [recipe().learning_rate(step, 1) for step in range(11)]
    assert rates[:10] == pytest.approx([4e-4 * (step + 1) for step in range(10)])
    assert rates[9] == rates[10] == 4e-3


def test_cosine_decay_is_the_closed_form() -> None:
    # cos is known in closed form at these shares of the way: 0, 1/3, 1/2, 2/3 of the 90 steps after warm-up
    shares = {10: 1.0, 40: 0.75, 55: 0.5, 70: 0.25}
    for step, share in shares.items():
        assert recipe().learning_rate(step, 1) == pytest.approx(1e-3 + share * 3e-3, rel=1e-12)
    last = 1e-3 + 3e-3 * math.sin(math.pi / 180) ** 2  # (1 + cos(pi - x)) / 2 = sin(x / 2)^2, x = pi / 90
    assert recipe().learning_rate(99, 1) == pytest.approx(last, rel=1e-12)


def test_linear_decay_is_the_closed_form() -> None:
    for step in range(10, 100):
        expected = 4e-3 - 3e-3 * (step - 10) / 90
        assert recipe(schedule="linear").learning_rate(step, 1) == pytest.approx(expected, rel=1e-12)


def test_constant_schedule_keeps_the_peak() -> None:
    assert {recipe(schedule="constant").learning_rate(step, 1) for step in range(10, 100)} == {4e-3}


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_the_rate_after_the_last_step_is_the_lowest(schedule: Any) -> None:
    assert recipe(schedule=schedule).learning_rate(100, 1) == 1e-3


def test_no_warm_up_starts_at_the_peak() -> None:
    assert recipe(warmup_ratio=0.0).learning_rate(0, 1) == 4e-3


def test_snapshots_are_log_spaced_with_the_first_and_the_last_step() -> None:
    steps = sorted(recipe(snapshots=12, max_tokens=1_024_000).snapshot_steps(1))
    assert steps == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


@pytest.mark.parametrize("snapshots, steps", [(0, set()), (1, {100}), (2, {0, 100}), (3, {0, 1, 100})])
def test_few_snapshots_keep_the_last_step_first(snapshots: int, steps: set[int]) -> None:
    assert recipe(snapshots=snapshots).snapshot_steps(1) == steps


NUMBERS = [
    *[(name, 0) for name in ("max_tokens", "batch_size", "accumulation", "epochs", "query_blocks")],
    *[(name, 0) for name in ("eval_interval", "save_interval", "log_interval", "lr", "grad_clip")],
    *[(name, -1) for name in ("weight_decay", "seed", "snapshots", "eval_windows", "lr", "max_tokens")],
    *[(name, 1.5) for name in ("min_lr_ratio", "warmup_ratio", "beta1", "beta2")],
    ("seq_length", 1),
    ("lr", math.nan),
    ("lr", math.inf),
]


@pytest.mark.parametrize("name, value", NUMBERS)
def test_a_number_out_of_range_is_refused_by_name(name: str, value: float, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"recipe.toml: {name} must be (at least|above) \d.*, got {value}"):
        read_recipe(write(tmp_path, **{name: value}))


WRONG_KINDS = [
    ("max_tokens", "many", "int"),
    ("max_tokens", 1.5, "int"),
    ("batch_size", True, "int"),
    ("lr", "fast", "float"),
    ("compile", 1, "bool"),
    ("model", 3, "dict"),
    ("arch", 3, "str"),
    ("data", 3, "str"),
]


@pytest.mark.parametrize("name, value, kind", WRONG_KINDS)
def test_a_value_of_the_wrong_type_is_refused_by_name(
    name: str, value: Any, kind: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"{name} must be of type {kind}, got {value!r}"):
        read_recipe(write(tmp_path, **{name: value}))


def test_an_unknown_choice_lists_the_choices(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="schedule must be one of cosine, linear, constant, got 'step'"):
        read_recipe(write(tmp_path, schedule="step"))


def test_unknown_fields_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown fields learning_rate; known: .*accumulation"):
        read_recipe(write(tmp_path, learning_rate=0.1))


def test_missing_fields_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="missing fields arch, max_tokens"):
        read_recipe(write(tmp_path, arch=None, max_tokens=None))


@pytest.mark.parametrize("content", [b"arch = ", b"arch = '\xff'"])
def test_a_file_that_is_no_toml_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.toml is not valid TOML"):
        read_recipe(tmp_path / "bad.toml")


def test_a_recipe_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no recipe at"):
        read_recipe(tmp_path / "none.toml")


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    assert read_recipe(write(tmp_path), out="elsewhere").out == Path("elsewhere")


def test_folders_are_no_part_of_what_a_resumed_run_must_share() -> None:
    assert recipe().as_dict() == recipe(data=Path("x"), out=Path("y")).as_dict()
    assert recipe().as_dict() != recipe(seed=1).as_dict()


def test_the_two_presets_differ_in_nothing_but_architecture_and_folder() -> None:
    plain = {path.stem: tomllib.loads(path.read_text()) for path in PRESETS.glob("reference-*.toml")}
    assert set(plain) == {"reference-satformer", "reference-transformer"}
    one, other = plain.values()
    assert {key for key in {*one, *other} if one.get(key) != other.get(key)} == {"arch", "out"}


@pytest.mark.parametrize("path", sorted(PRESETS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_preset_is_a_valid_recipe(path: Path) -> None:
    assert read_recipe(path).max_steps(1) > 0
