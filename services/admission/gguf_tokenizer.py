"""The tokenizer of a GGUF file: byte-level BPE with the pre-tokenizer that the file names.

Shell: reads the file's header.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, normalizers
from tokenizers.models import BPE

from services.admission.pretokenizers import PRE_RULES, PreRule
from services.admission.token_parts import (
    CONTROL,
    USER_DEFINED,
    TokenizerParts,
    byte_level_bytes,
)
from services.models.errors import ModelFileError
from services.models.gguf_file import TokenizerMetadata, read_metadata


def parts_from_gguf(path: Path) -> TokenizerParts:
    """The tokenizer in the header of `path`. Raises ModelFileError."""
    metadata = read_metadata(path)
    rule = _pre_rule(path, metadata)
    if metadata.eos_token_id is None:
        raise ModelFileError(path, "tokenizer.ggml.eos_token_id is missing")
    types = metadata.token_types
    control_ids = frozenset(np.flatnonzero(types == CONTROL).tolist())
    vocabulary = {text: index for index, text in enumerate(metadata.tokens)}
    for name in ("bos_token_id", "eos_token_id"):
        token_id = getattr(metadata, name)
        if token_id is not None and not 0 <= token_id < len(metadata.tokens):
            raise ModelFileError(
                path, f"tokenizer.ggml.{name} {token_id} is outside the vocabulary"
            )
    backend = _backend(path, vocabulary, metadata.merges, rule)
    backend.add_tokens(
        [
            AddedToken(metadata.tokens[index], special=bool(index in control_ids), normalized=False)
            for index in np.flatnonzero((types == CONTROL) | (types == USER_DEFINED)).tolist()
        ]
    )
    added = {text.content for text in backend.get_added_tokens_decoder().values()}
    add_bos = rule.adds_bos if metadata.add_bos_token is None else metadata.add_bos_token
    texts = [text.encode() if text in added else byte_level_bytes(text) for text in metadata.tokens]
    return TokenizerParts(
        backend,
        texts,
        control_ids,
        metadata.bos_token_id,
        (metadata.eos_token_id,),
        add_bos,
        metadata.chat_template,
    )


def _pre_rule(path: Path, metadata: TokenizerMetadata) -> PreRule:
    known = ", ".join(PRE_RULES)
    if metadata.model != "gpt2":
        found = metadata.model or "missing"
        raise ModelFileError(path, f"tokenizer.ggml.model is {found}", "gpt2 (byte-level BPE)")
    if not metadata.pre:
        raise ModelFileError(
            path, "tokenizer.ggml.pre is missing: how to cut text is unknown", known
        )
    if metadata.pre not in PRE_RULES:
        raise ModelFileError(path, f"tokenizer.ggml.pre {metadata.pre!r} is not known", known)
    return PRE_RULES[metadata.pre]


def _backend(
    path: Path, vocabulary: dict[str, int], merges: list[str], rule: PreRule
) -> tokenizers.Tokenizer:
    parts = [merge.partition(" ") for merge in merges]
    if not all(right for _left, _space, right in parts):
        raise ModelFileError(path, "tokenizer.ggml.merges has an entry that is no pair")
    pairs = [(left, right) for left, _space, right in parts]
    try:
        model = BPE(vocab=vocabulary, merges=pairs, ignore_merges=rule.ignore_merges)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise ModelFileError(path, f"vocabulary and merges do not fit: {error}") from None
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = rule.build()
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    return backend
