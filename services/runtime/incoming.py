"""What arrives on the bus, as messages: what is none of ours is dropped, counted and said.

Shell: writes to the log.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

from services.contracts.codec import Decoder
from services.contracts.errors import WireError
from services.runtime.bus import Delivery
from services.runtime.log import get_logger

T = TypeVar("T")


class Incoming:
    """dropped: messages by reason; the service that owns it counts its own in it as well."""

    def __init__(self, service: str) -> None:
        self.dropped: Counter[str] = Counter()
        self._log = get_logger(service)

    def decoded(self, decoder: Decoder[T], delivery: Delivery) -> T | None:
        """The message, or None where the bytes are none that `decoder` knows."""
        try:
            return decoder.decode(delivery.payload)
        except WireError as error:
            self.dropped["wire"] += 1
            self._log.warning("message_dropped", subject=delivery.subject, reason=str(error))
            return None
