"""Text to token ids and ids to bytes.

Invariants: `encode` with `parse_special=False` never gives a control token, whatever the text says;
a tokenizer is never guessed: what the model's files do not say clearly is an error that names it.
A Tokenizer is not changed after it is loaded, so any thread may use it; encoding lets other threads
run meanwhile.

Shell: `load_tokenizer` reads model files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers

from services.admission.chat_template import Piece, control_pattern
from services.admission.directory_tokenizer import parts_from_directory
from services.admission.gguf_tokenizer import parts_from_gguf
from services.admission.token_parts import TokenizerParts


class Tokenizer:
    """One model's tokenizer.

    token_bytes: [vocab_size] bytes of each token, empty for control tokens, which are not shown.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._special = parts.backend
        self._plain = tokenizers.Tokenizer.from_str(parts.backend.to_str())
        self._plain.encode_special_tokens = True
        self._texts = [text.decode("utf-8", "replace") for text in parts.token_bytes]
        self._control_ids = {self._texts[i]: i for i in sorted(parts.control_ids)}
        self._control = control_pattern(self._control_ids)
        self.token_bytes: Sequence[bytes] = [
            b"" if index in parts.control_ids else text
            for index, text in enumerate(parts.token_bytes)
        ]

    @property
    def vocab_size(self) -> int:
        return len(self.token_bytes)

    @property
    def longest_token_bytes(self) -> int:
        """No token stands for more bytes; at least 1."""
        return max(1, *map(len, self.token_bytes))

    @property
    def bos_token_id(self) -> int | None:
        return self._parts.bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, ascending."""
        return self._parts.eos_token_ids

    @property
    def chat_template(self) -> str | None:
        """Source of the model's template, or None for a model without one."""
        return self._parts.chat_template

    @property
    def control_texts(self) -> tuple[str, ...]:
        return tuple(self._control_ids)

    def token_text(self, token_id: int) -> str:
        """The token as text, control tokens by name; bytes that are no character are U+FFFD.

        Empty beyond the vocabulary, where models with padded embeddings may sample.
        """
        return self._texts[token_id] if token_id < len(self._texts) else ""

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """`text` as token ids.

        add_special: begin with the beginning-of-text token where the model wants one.
        parse_special: text that names a control token becomes that token, else ordinary tokens.
        """
        ids = self._encode_special(text) if parse_special else self._encode_plain(text)
        return self._with_bos(ids) if add_special else ids

    def encode_pieces(self, pieces: Sequence[Piece], *, add_special: bool = True) -> list[int]:
        """A rendered chat as token ids; text of pieces marked as content gives no control token.

        The same as `encode` of the whole text where no piece is marked: a run of text between two
        control tokens is always tokenised as a whole, whatever pieces it is made of.
        """
        if not any(piece.is_content for piece in pieces):
            ids = self._encode_special("".join(piece.text for piece in pieces))
        else:
            ids = self._encode_mixed(pieces)
        return self._with_bos(ids) if add_special else ids

    def decode_bytes(self, token_ids: Iterable[int]) -> bytes:
        """The bytes that `token_ids` show; raises IndexError for an id outside the vocabulary."""
        return b"".join(self.token_bytes[token_id] for token_id in token_ids)

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos = self._parts.bos_token_id
        # A template that writes the token itself has said it once; twice would be wrong.
        if not self._parts.add_bos or bos is None or ids[:1] == [bos]:
            return ids
        return [bos, *ids]

    def _encode_special(self, text: str) -> list[int]:
        return _encode(self._special, text)

    def _encode_plain(self, text: str) -> list[int]:
        ids = _encode(self._plain, text)
        if self._parts.control_ids.isdisjoint(ids):
            return ids
        # The merges of some vocabularies can build a control token; single characters cannot.
        return [i for character in text for i in _encode(self._plain, character)]

    def _encode_mixed(self, pieces: Sequence[Piece]) -> list[int]:
        assert self._control is not None, "content is marked only where there are control tokens"
        ids: list[int] = []
        run: list[str] = []
        for piece in pieces:
            start = 0
            for found in () if piece.is_content else self._control.finditer(piece.text):
                run.append(piece.text[start : found.start()])
                ids += self._encode_plain("".join(run))
                ids.append(self._control_ids[found[0]])
                run, start = [], found.end()
            run.append(piece.text[start:])
        return ids + self._encode_plain("".join(run))


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file or a Hugging Face directory. Raises ModelFileError."""
    return Tokenizer(parts_from_directory(path) if path.is_dir() else parts_from_gguf(path))


def _encode(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    # The batch call lets other threads run; the single one holds the interpreter throughout.
    encodings = backend.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = encodings[0].ids
    return ids
