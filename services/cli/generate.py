"""`streetcar generate`: one prompt, its completion token by token.

Shell: the public client.
"""

from __future__ import annotations

import asyncio

from services.cli.output import print_json
from services.cli.requests import RequestOptions, Traces, cluster_of, connected


def generate(
    prompt: str,
    options: RequestOptions | None = None,
    *,
    trace: bool = False,
    json: bool = False,
) -> int:
    """Complete a prompt.

    Parameters
    ----------
    prompt
        The text to continue.
    trace
        Show on standard error where the time went, from this command to the worker and back.
    json
        Print every frame as one object, and with --trace every span.
    """
    asyncio.run(_generate(prompt, options or RequestOptions(), traced=trace, as_json=json))
    return 0


async def _generate(prompt: str, options: RequestOptions, *, traced: bool, as_json: bool) -> None:
    settings, cluster, model = cluster_of(options)
    traces = Traces(settings, cluster, as_json=as_json)
    on_span = traces.add if traced else None
    async with connected(cluster.nats_url, settings.subject_prefix, on_span) as client:
        async for frame in client.generate(model, prompt=prompt, **options.fields()):
            if as_json:
                print_json(frame)
            else:
                print(frame["text"], end="", flush=True)
    if not as_json:
        print()
    await traces.show()
