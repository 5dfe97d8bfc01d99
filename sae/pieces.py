"""How a vocabulary entry is shown: its piece and its text, made printable by one escape that can be undone."""

import json
import re
from functools import cache
from typing import TYPE_CHECKING, Any

from sae.judges import Token

if TYPE_CHECKING:
    import pandas as pd

_SHORT = {"\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
_LONG = {shown: char for char, shown in _SHORT.items()}
_ESCAPED = re.compile(r"\\(?:[\\ntr]|x[0-9A-F]{2}|u[0-9A-F]{4}|U[0-9A-F]{8})")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_RAW_BYTES = 0xDC00
"""Where Python's `surrogateescape` keeps a byte that is no UTF-8: byte b is the lone surrogate U+DC00 + b."""
SPACE = "▁"


def escape(text: str) -> str:
    r"""The text in printable characters only; `unescape` gives it back.

    Backslash, line break, tab and carriage return become ``\\ \n \t \r``; a raw byte that is no character becomes
    ``\xE2``; whatever else is not printable (controls, bidi and other format characters, lone surrogates, white
    space that is not the ordinary one) becomes ``\u202E`` or ``\U000E0001``. All else stays, U+FFFD too.
    """
    return "".join(_SHORT.get(char) or (char if char.isprintable() else _code(char)) for char in text)


def unescape(shown: str) -> str:
    """What `escape` was given.

    Raises:
        ValueError: a backslash that `escape` would not have written.
    """
    if "\\" in _ESCAPED.sub("", shown):
        raise ValueError(f"{shown!r} is not escaped text: a backslash stands alone")
    return _ESCAPED.sub(lambda match: _char(match.group()), shown)


def token_of(tokenizer: Any, token_id: int) -> Token:
    """One vocabulary entry. An id beyond the vocabulary (a padded embedding) has an empty piece and text."""
    piece = tokenizer.convert_ids_to_tokens(int(token_id))
    if piece is None:
        return Token(id=int(token_id), piece="", text="")
    added = token_id in tokenizer.added_tokens_decoder
    text = piece if added else _text_of(piece, _spelling(tokenizer))
    return Token(id=int(token_id), piece=escape(piece), text=escape(text))


def pieces(tokenizer: Any, n: int) -> "pd.DataFrame":
    """The first ``n`` entries, one a row: `token_id`, `piece`, `text`. Equal strings stay apart by their id."""
    import pandas as pd

    tokens = [token_of(tokenizer, token_id) for token_id in range(n)]
    return pd.DataFrame(
        {
            "token_id": [token.id for token in tokens],
            "piece": [token.piece for token in tokens],
            "text": [token.text for token in tokens],
        }
    )


def _spelling(tokenizer: Any) -> str:
    """How this tokenizer spells pieces: `bytes` (GPT-2's letters for bytes) or `marks` (Llama's ``▁``, ``<0x0A>``).

    Its decoder says so. Decoding a single id would not do: Llama's decoder drops the leading space.
    """
    decoder = tokenizer.backend_tokenizer.decoder
    described = json.loads(decoder.__getstate__()) if decoder is not None else {}
    parts = described.get("decoders", [described])
    return "bytes" if any(part.get("type") == "ByteLevel" for part in parts) else "marks"


def _text_of(piece: str, spelling: str) -> str:
    if spelling == "bytes":
        letters = _byte_letters()
        if all(char in letters for char in piece):
            return bytes(letters[char] for char in piece).decode("utf-8", "surrogateescape")
        return piece
    if byte := _BYTE.fullmatch(piece):
        return bytes([int(byte.group(1), 16)]).decode("utf-8", "surrogateescape")
    return piece.replace(SPACE, " ")


@cache
def _byte_letters() -> dict[str, int]:
    """GPT-2's alphabet: the printable bytes stand for themselves, the others for letters from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _code(char: str) -> str:
    code = ord(char)
    if _RAW_BYTES + 0x80 <= code <= _RAW_BYTES + 0xFF:
        return f"\\x{code - _RAW_BYTES:02X}"
    return f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"


def _char(shown: str) -> str:
    if shown in _LONG:
        return _LONG[shown]
    code = int(shown[2:], 16)
    return chr(code + _RAW_BYTES if shown[1] == "x" else code)
