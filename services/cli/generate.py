"""`streetcar generate`: one prompt, its completion token by token.

Shell: the public client.
"""

from __future__ import annotations

import asyncio

from services.cli.output import print_json
from services.cli.requests import RequestOptions, cluster_of, connected


def generate(prompt: str, options: RequestOptions | None = None, *, json: bool = False) -> int:
    """Complete a prompt.

    Parameters
    ----------
    prompt
        The text to continue.
    json
        Print every frame as one object.
    """
    asyncio.run(_generate(prompt, options or RequestOptions(), as_json=json))
    return 0


async def _generate(prompt: str, options: RequestOptions, *, as_json: bool) -> None:
    settings, cluster, model = cluster_of(options)
    async with connected(cluster.nats_url, settings.subject_prefix) as client:
        async for frame in client.generate(model, prompt=prompt, **options.fields()):
            if as_json:
                print_json(frame)
            else:
                print(frame["text"], end="", flush=True)
    if not as_json:
        print()
