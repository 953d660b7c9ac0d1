"""How text is cut before BPE merges it: one rule for each `tokenizer.ggml.pre` that is known.

The patterns are those of the models' own tokenizers, by the names that llama.cpp gives them
(src/llama-vocab.cpp). A missing or unknown name is an error: another rule gives other tokens, and
worse answers.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
)
_QWEN2: Final = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
)
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
)


@dataclass(frozen=True, slots=True)
class PreRule:
    """patterns: applied one after the other, each to the pieces of the one before.

    ignore_merges: a piece that is a token of its own is taken whole. nfc: text is composed first.
    adds_bos: whether a prompt starts with the beginning-of-text token where the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    nfc: bool = False
    adds_bos: bool = False

    def build(self) -> PreTokenizer:
        """The rule for byte-level BPE: cut, then map bytes to the vocabulary's alphabet."""
        splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in self.patterns]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, byte_level])


_LLAMA3_RULE: Final = PreRule((_LLAMA3,), ignore_merges=True, adds_bos=True)
_DEFAULT_RULE: Final = PreRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

PRE_RULES: Final[dict[str, PreRule]] = {
    # The digits of SmolLM's vocabulary have no merges, so they need no rule of their own; the
    # reference tokenisation of this project keeps a space or newline before a digit apart.
    "smollm": PreRule((_GPT2,)),
    "gpt-2": PreRule((_GPT2,)),
    "default": _DEFAULT_RULE,
    "llama-bpe": _LLAMA3_RULE,
    "llama3": _LLAMA3_RULE,
    "qwen2": PreRule((_QWEN2,), nfc=True),
    "gpt-4o": PreRule((_GPT4O,)),
    "llama4": PreRule((_GPT4O,), adds_bos=True),
}
