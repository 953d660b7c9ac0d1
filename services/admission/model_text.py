"""The text side of one served model: prompts to token ids, and what turning ids back needs.

Shell: reads the model's files once, at the start; after that it computes only, and may be called
from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.contracts.errors import ErrorCode, RequestError
from services.contracts.public import GenerateRequest
from services.models import catalog
from services.models.errors import ModelFileError
from services.runtime.problem import Problem
from services.runtime.settings import Settings

from .chat_template import ChatTemplate, TemplateError
from .stub_tokenizer import StubTokenizer
from .tokenizer import Tokenizer, load_tokenizer


class ModelText:
    """`template`: None for a model that has none, which refuses `messages`."""

    def __init__(
        self, name: str, tokenizer: Tokenizer | StubTokenizer, template: ChatTemplate | None
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self._template = template

    @property
    def token_bytes(self) -> Sequence[bytes]:
        return self.tokenizer.token_bytes

    def token_text(self, token_id: int) -> str:
        return self.tokenizer.token_text(token_id)

    def prompt_token_ids(self, request: GenerateRequest) -> Sequence[int]:
        """The prompt of a checked request, tokenised. Raises RequestError where a template refuses
        it.
        """
        if request.prompt_token_ids is not None:
            return request.prompt_token_ids
        if request.prompt is not None:
            return self.tokenizer.encode(request.prompt)
        assert request.messages is not None
        if self._template is None or isinstance(self.tokenizer, StubTokenizer):
            raise RequestError(
                ErrorCode.INVALID_REQUEST,
                f"{self.name} has no chat template; send `prompt` instead of `messages`",
            )
        return self.tokenizer.encode_pieces(self._template.render(request.messages))


def load_model_text(settings: Settings) -> ModelText:
    """Raises Problem where the model's files are missing or wrong."""
    name = settings.served_name or catalog.served_name(settings.model)
    if settings.worker == "stub":
        return ModelText(name, StubTokenizer(), None)
    try:
        tokenizer = load_tokenizer(catalog.path(settings.model, settings.cache_path))
        return ModelText(name, tokenizer, _template(tokenizer))
    except ModelFileError as error:
        raise Problem("E301", "Model cannot be loaded", cause=str(error)) from None
    except TemplateError as error:
        raise Problem("E305", "Chat template cannot be used", cause=str(error)) from None


def _template(tokenizer: Tokenizer) -> ChatTemplate | None:
    if tokenizer.chat_template is None:
        return None
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_ids
    return ChatTemplate(
        tokenizer.chat_template,
        control_texts=tokenizer.control_texts,
        bos_token="" if bos is None else tokenizer.token_text(bos),
        eos_token=tokenizer.token_text(eos[0]) if eos else "",
    )
