"""The tokenizer of a Hugging Face directory: tokenizer.json and what the config files add to it.

Shell: reads files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import tokenizers

from services.admission.token_parts import TokenizerParts, byte_level_bytes, sentence_bytes
from services.models.errors import ModelFileError

MAX_JSON_BYTES: Final = 64 * 1024 * 1024
"""Of each file; the largest known tokenizer.json has 35 MB."""


def parts_from_directory(path: Path) -> TokenizerParts:
    """The tokenizer of the model in `path`. Raises ModelFileError."""
    source = path / "tokenizer.json"
    table = _read_json(source)
    try:
        backend = tokenizers.Tokenizer.from_file(str(source))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise ModelFileError(source, f"is not a tokenizer: {error}") from None
    backend.no_padding()
    backend.no_truncation()
    config = _read_json(path / "tokenizer_config.json", optional=True)
    added = backend.get_added_tokens_decoder()
    control_ids = frozenset(i for i, token in added.items() if token.special)
    kind = _alphabet(source, table)
    texts = []
    for index in range(backend.get_vocab_size(with_added_tokens=True)):
        text = backend.id_to_token(index) or ""
        if index in added:
            texts.append(added[index].content.encode())
        else:
            texts.append(byte_level_bytes(text) if kind == "bytes" else sentence_bytes(text))
    bos_text = _token_text(config.get("bos_token"))
    bos = backend.token_to_id(bos_text) if bos_text else None
    probe = backend.encode("a", add_special_tokens=True).ids
    return TokenizerParts(
        backend,
        texts,
        control_ids,
        bos,
        _directory_eos(path, backend, config),
        bos is not None and probe[:1] == [bos],
        _directory_template(path, config),
    )


def _alphabet(source: Path, table: dict[str, Any]) -> str:
    """`bytes`: tokens are spelled in GPT-2's letters for bytes; `marks`: spaces are U+2581."""
    decoder = table.get("decoder") or {}
    stages = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    kinds = {stage.get("type") for stage in stages if isinstance(stage, dict)}
    if "ByteLevel" in kinds:
        return "bytes"
    if kinds & {"ByteFallback", "Metaspace"}:
        return "marks"
    found = ", ".join(sorted(map(str, kinds))) or "none"
    raise ModelFileError(
        source, f"decoder {found} is not known", "ByteLevel, ByteFallback, Metaspace"
    )


def _directory_eos(
    path: Path, backend: tokenizers.Tokenizer, config: dict[str, Any]
) -> tuple[int, ...]:
    """End tokens of generation_config.json, else of config.json, else the tokenizer's own."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(path / name, optional=True).get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        ids = {i for i in values if isinstance(i, int) and 0 <= i < backend.get_vocab_size()}
        if ids:
            return tuple(sorted(ids))
    text = _token_text(config.get("eos_token"))
    token_id = backend.token_to_id(text) if text else None
    if token_id is None:
        raise ModelFileError(path, "no eos_token_id in generation_config.json or config.json")
    return (token_id,)


def _directory_template(path: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja where there is one, else the entry in tokenizer_config.json."""
    own = path / "chat_template.jinja"
    if own.is_file():
        return _read_text(own)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(value: object) -> str:
    """A token in tokenizer_config.json is its text, or an object with `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(path, f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFileError(path, "is not a JSON object")
    return value


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_JSON_BYTES + 1)
        if len(raw) > MAX_JSON_BYTES:
            raise ModelFileError(path, f"is longer than {MAX_JSON_BYTES} bytes")
        return raw.decode()
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ModelFileError(path, f"is not UTF-8: {error.reason}") from None
