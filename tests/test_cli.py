"""The command line: help without torch, results alone on stdout, and a user's mistake is one line and exit code 2."""

import subprocess
import sys

import pytest

from satlens.cli import main, verbs


def run(capsys, *argv):
    code = main(list(argv))
    out = capsys.readouterr()
    return code, out.out, out.err


def test_help_names_every_verb_and_does_not_import_torch():
    script = "import sys; from satlens.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for verb in verbs():
        assert f"  {verb} " in done.stdout


@pytest.mark.parametrize("verb", verbs())
def test_every_verb_explains_itself_with_an_example(capsys, verb):
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "Examples" in text and f"satlens {verb}" in text


def test_an_unknown_verb_suggests_the_nearest(capsys):
    code, out, err = run(capsys, "gate")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and "did you mean gates?" in err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("gates", "nowhere"), "no folder nowhere"),
        (("gates", "reference-satformer", "--text", "missing.jsonl"), "no text at missing.jsonl"),
        (("gates", "reference-transformer", "--tokens", "100"), "it has no gate on first-layer values"),
        (("ablate", "--layers", "0", "--tokens", "9000"), "layer 0 produces V1"),
        (("gates", "--batch-size", "0"), "batch size must be at least 1"),
        (("report", "nowhere"), "not finished or not a run"),
        (("train", "nowhere.toml"), "no recipe at nowhere.toml"),
        (("gates", "--device", "cuda", "--tokens", "100"), "cannot use device cuda"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(capsys, tmp_path, argv, words):
    import torch

    if "cuda" in argv and torch.cuda.is_available():
        pytest.skip("a CUDA device is there")
    runs = () if argv[0] in ("report", "train") else ("--runs", str(tmp_path))
    code, out, err = run(capsys, *argv, *runs)
    assert (code, out) == (2, "")
    assert words in err and "Traceback" not in err
    assert err.strip().count("\n") == 0
    assert not list(tmp_path.iterdir())


def test_an_interrupt_is_130(capsys, monkeypatch):
    def interrupt(config):
        raise KeyboardInterrupt

    monkeypatch.setattr("satlens.training.train_command.run", interrupt)
    assert run(capsys, "train", "x.toml")[0] == 130


def test_a_verb_may_have_two_words_and_its_first_word_alone_lists_them(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr("satlens.cli._run", lambda verb, rest: seen.append((verb, rest)) or 0)
    assert run(capsys, "sae", "train", "model", "--k", "8")[0] == 0
    assert seen == [("sae train", ["model", "--k", "8"])]
    monkeypatch.undo()
    monkeypatch.setattr("satlens.cli._first_line", lambda module: module)
    code, out, _ = run(capsys, "sae", "--help")
    assert code == 0 and "sae train" in out and "sae label" in out and "gates" not in out
    for words in (("sae",), ("sae", "--bogus"), ("sae", "cook")):
        code, out, err = run(capsys, *words)
        assert (code, out) == (2, "") and "sae train" in err


def test_a_mistyped_two_word_verb_is_told_its_neighbour(capsys):
    assert "did you mean sae label?" in run(capsys, "sae", "lable")[2]
