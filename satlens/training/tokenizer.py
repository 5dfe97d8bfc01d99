"""Train a Llama-style BPE tokenizer: leading-space marks, single digits, byte fallback, <unk> <s> </s> as ids 0-2."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BYTES = [f"<0x{i:02X}>" for i in range(256)]
SPECIALS = ["<unk>", "<s>", "</s>"]
SPACE = "▁"
LINE_MARKS = "\r\n\t"
# runs of spaces, words with their leading space, single digits, runs of other symbols, line breaks one by one
PIECES = rf"{SPACE}+(?={SPACE})|{SPACE}?[\p{{L}}\p{{M}}]+|\p{{N}}|{SPACE}?[^\s{SPACE}\p{{L}}\p{{M}}\p{{N}}]+|{SPACE}|\s"


def train_tokenizer(texts: Iterable[str], vocab_size: int, out: Path, alphabet: int = 800) -> Any:
    """Train on ``texts`` and save a folder that ``AutoTokenizer`` opens; the same texts give the same bytes.

    Line breaks and tabs are kept out of the alphabet on purpose: like Llama's, they become byte tokens, so that
    byte-level fallback occurs in ordinary text. So do characters beyond the ``alphabet`` most frequent ones.
    A literal ``▁`` is read as a space, and ``</s>`` written in a text is the special token, as with Llama's.
    """
    from tokenizers import AddedToken, Regex, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    texts = list(texts)
    tokenizer = _blank_tokenizer()
    isolate = pre_tokenizers.Split(Regex(PIECES), "isolated")
    without_marks = pre_tokenizers.Split(Regex(f"[{LINE_MARKS}]"), "removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([without_marks, isolate])
    letters = _alphabet(texts, alphabet)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIALS, *BYTES],
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer = _without_special_bytes(tokenizer)
    tokenizer.pre_tokenizer = isolate
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(out)
    return fast


def _alphabet(texts: list[str], size: int) -> list[str]:
    """The ``size`` most frequent characters. The trainer's own choice among equally rare ones is random."""
    counts: Counter[str] = Counter({SPACE: len(texts)})  # every text starts with the mark
    for text in texts:
        counts.update(text)
    counts[SPACE] += counts.pop(" ", 0)
    for mark in LINE_MARKS:
        counts.pop(mark, None)
    return sorted(counts, key=lambda char: (-counts[char], char))[:size]


def _blank_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _without_special_bytes(trained: Any) -> Any:
    """Rebuild with the byte tokens as plain vocabulary: the trainer can reserve their ids only by calling them
    special, which would make the text ``<0x0A>`` encode as a line break."""
    from tokenizers import models

    model = json.loads(trained.to_str())["model"]
    rebuilt = _blank_tokenizer()
    merges = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in model["merges"]]
    rebuilt.model = models.BPE(
        vocab=model["vocab"], merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"
    )
    return rebuilt
