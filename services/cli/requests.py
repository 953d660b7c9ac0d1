"""What the commands that ask a model share: sampling flags, the model's name, errors.

Shell: reads settings; the client owns the network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from services.cli.running_file import RunningCluster, find_cluster
from services.models import catalog
from services.runtime.problem import Problem
from services.runtime.settings import Settings, load

if TYPE_CHECKING:
    from services.client import Client


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Which cluster, which model, and how to sample; None where the flag was not given."""

    nats_url: Annotated[str | None, Parameter(name="--nats", help="bus of the cluster")] = None
    model: Annotated[str | None, Parameter(help="served name of the model")] = None
    max_tokens: Annotated[int | None, Parameter(help="tokens to generate at most")] = None
    temperature: Annotated[float | None, Parameter(help="0: greedy")] = None
    top_p: Annotated[float | None, Parameter(help="nucleus, in (0, 1]")] = None
    top_k: Annotated[int | None, Parameter(help="most likely tokens kept, 0: all")] = None
    min_p: Annotated[float | None, Parameter(help="least share of the likeliest, 0: off")] = None
    repetition_penalty: Annotated[float | None, Parameter(help="1: off")] = None
    presence_penalty: Annotated[float | None, Parameter(help="-2 to 2, 0: off")] = None
    frequency_penalty: Annotated[float | None, Parameter(help="-2 to 2, 0: off")] = None
    seed: Annotated[int | None, Parameter(help="makes a sampled answer repeatable")] = None
    stop: Annotated[list[str] | None, Parameter(help="text that ends the answer")] = None

    def settings(self) -> Settings:
        """Settings of which only the bus, the prefix and the model's name matter here."""
        return load(flags={} if self.nats_url is None else {"nats_url": self.nats_url})

    def fields(self) -> dict[str, Any]:
        """The request's fields that were given."""
        apart = {"nats_url", "model"}
        names = [f.name for f in dataclasses.fields(self) if f.name not in apart]
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def served_model(self, settings: Settings, cluster: RunningCluster) -> str:
        """The flag, else the running cluster's model, else the settings' one."""
        named = self.model or cluster.model or settings.served_name
        return named or catalog.served_name(settings.model)


class Traces:
    """`--trace`: shows the trace of each request after its answer, with the client's own span,
    which nobody else has.
    """

    def __init__(self, settings: Settings, cluster: RunningCluster, *, as_json: bool) -> None:
        self._settings = settings
        self._cluster = cluster
        self._as_json = as_json
        self._spans: list[dict[str, Any]] = []

    def add(self, span: dict[str, Any]) -> None:
        self._spans.append(span)

    async def show(self) -> None:
        """What was added since the last call. Raises Problem where the bus does not let us ask."""
        from services.cli.trace import show_own

        spans, self._spans = self._spans, []
        for span in spans:
            url, prefix = self._cluster.watch_url, self._settings.subject_prefix
            await show_own(url, prefix, span, as_json=self._as_json)


@asynccontextmanager
async def connected(
    url: str, prefix: str, on_span: Callable[[dict[str, Any]], None] | None = None
) -> AsyncIterator[Client]:
    """A client whose errors come as Problems."""
    from services.client import Client, StreetcarClientError

    try:
        async with Client(url, prefix=prefix, on_span=on_span) as client:
            yield client
    except StreetcarClientError as error:
        title = f"Request refused ({error.code})"
        raise Problem("E405", title, cause=error.message) from error


def cluster_of(options: RequestOptions) -> tuple[Settings, RunningCluster, str]:
    """Settings, cluster and served model for these flags. Raises Problem."""
    settings = options.settings()
    cluster = find_cluster(settings)
    return settings, cluster, options.served_model(settings, cluster)
