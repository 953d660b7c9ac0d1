"""The requests of one history, each with the one answer that is right.

Pure: the random source is the world's.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from gpu_worker.shadow import expected_token_ids
from services.contracts.public import GenerateRequest

from .clients import Client, Expected
from .model import VOCAB_SIZE, Mark
from .options import SECOND_NS, Options

# Admission hears of the engine by its beat: the first request comes after it.
WARM_UP_NS: Final = SECOND_NS


class Workload:
    def __init__(self, world: Any) -> None:
        self.world = world
        self.rng = world.rng
        self.options: Options = world.options
        self._prompts: list[list[int]] = []
        self._shared = [self.rng.randrange(VOCAB_SIZE) for _ in range(self.options.shared_prefix)]

    def begin(self) -> int:
        """Draw the requests and their cancels -> when the last one comes."""
        o, rng, clock = self.options, self.rng, self.world.clock
        at_ns: int = clock.now_ns + WARM_UP_NS
        for _ in range(o.num_requests):
            at_ns += int(rng.expovariate(1.0 / o.mean_arrival_ns))
            client = self._draw_client()
            clock.at(at_ns, client.start)
            delay_ns = int(rng.expovariate(1.0 / (20 * o.step_base_ns)))
            if rng.random() < o.cancel:
                clock.at(at_ns + delay_ns, client.cancel)
            elif rng.random() < o.vanish:
                clock.at(at_ns + delay_ns, client.vanish)
        return at_ns

    def probe(self) -> None:
        """A few more, now that nothing is wrong: nothing but the right answer will do."""
        for _ in range(self.options.num_probes):
            client = self._draw_client(is_probe=True)
            client.start()

    def _draw_client(self, *, is_probe: bool = False) -> Client:
        o, rng = self.options, self.rng
        number = len(self.world.clients) + 1
        prompt = self._draw_prompt()
        max_tokens = rng.randint(1, o.max_output)
        stop_token_ids: list[int] = []
        token_ids = expected_token_ids(np.array(prompt, np.int32), max_tokens, VOCAB_SIZE)
        stopped = rng.random() < o.stop
        if stopped:
            stop_token_ids = [token_ids[rng.randrange(len(token_ids))]]
            token_ids = token_ids[: token_ids.index(stop_token_ids[0])]
        deadline_ms = None
        if not is_probe and rng.random() < o.deadline:
            deadline_ms = rng.choice([1, 20, 200, 5000])
        if not is_probe:
            self._mark(number)
        if not is_probe and rng.random() < o.never_fits:
            max_tokens = o.max_model_len
        request = GenerateRequest(
            prompt_token_ids=prompt,
            request_id=f"r{number}",
            max_tokens=max_tokens,
            temperature=0.0,
            seed=number,
            stop_token_ids=stop_token_ids or None,
            stream=rng.random() < 0.8,
            cache_salt=f"tenant-{rng.randrange(o.num_salts)}",
            priority=rng.choice([0, 0, 0, 1, -1]),
            deadline_ms=deadline_ms,
        )
        client = Client(self.world, request, Expected(token_ids, stopped), is_probe=is_probe)
        self.world.add(client)
        return client

    def _mark(self, number: int) -> None:
        """Something may be wrong with the request, from a length on that it may reach."""
        o, rng = self.options, self.rng
        mark = None
        if rng.random() < o.nan:
            mark = Mark.NAN
        if rng.random() < o.poison:
            mark = rng.choice([mark for mark in Mark if mark is not Mark.NAN])
        if mark is not None:
            self.world.marks[number] = (mark, rng.randint(1, o.max_model_len))

    def _draw_prompt(self) -> list[int]:
        """A new one, or one that was asked before: it may have been evicted meanwhile."""
        o, rng = self.options, self.rng
        if o.num_prompts and len(self._prompts) >= o.num_prompts:
            known: list[int] = rng.choice(self._prompts)
            return known
        length = rng.randint(o.max_prompt // 2 if o.num_prompts else 1, o.max_prompt)
        prompt = self._shared[: min(length, o.shared_prefix)]
        prompt = prompt + [rng.randrange(VOCAB_SIZE) for _ in range(length - len(prompt))]
        self._prompts.append(prompt)
        return prompt
