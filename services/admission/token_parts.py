"""What a model's files say about its tokenizer, whichever kind of files they are.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import tokenizers

CONTROL: Final = 3
USER_DEFINED: Final = 4
"""Token types as GGUF numbers them."""

_SPACE_MARK: Final = "\u2581"


@dataclass(frozen=True, slots=True, eq=False)
class TokenizerParts:
    """Everything that a Tokenizer is made of.

    token_bytes: [vocab_size] bytes of each token. control_ids: tokens that are not text; those of
    eos_token_ids end an answer. add_bos: a prompt begins with `bos_token_id`.
    """

    backend: tokenizers.Tokenizer
    token_bytes: list[bytes]
    control_ids: frozenset[int]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool
    chat_template: str | None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for the 256 bytes: printable ones as they are, the rest from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES: Final = _byte_alphabet()


def byte_level_bytes(text: str) -> bytes:
    """A token in GPT-2's letters for bytes; one that is not spelled so stands for itself."""
    try:
        return bytes([_BYTES[letter] for letter in text])
    except KeyError:
        return text.encode()


def sentence_bytes(text: str) -> bytes:
    """A SentencePiece token: `<0x0A>` is a byte, U+2581 a space."""
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            return text.encode()
    return text.replace(_SPACE_MARK, " ").encode()
